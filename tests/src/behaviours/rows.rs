//! Reads the checklist of `rows.yaml`: behaviours that users of a Kubernetes service proxy rely on.

use std::{collections::BTreeMap, sync::LazyLock};

use serde::Deserialize;

use crate::testbed::Backend;

/// A backend of the checklist.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Column {
    /// iptables, all variants and layouts.
    Iptables,
    /// IPVS.
    Ipvs,
    /// nftables.
    Nftables,
    /// A proxy in the agent, behind rules of nftables.
    Userspace,
}

impl Column {
    /// All backends of the checklist.
    pub const ALL: [Self; 4] = [Self::Iptables, Self::Ipvs, Self::Nftables, Self::Userspace];

    /// The backend's name in comments and on the page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Iptables => "iptables",
            Self::Ipvs => "ipvs",
            Self::Nftables => "nftables",
            Self::Userspace => "userspace",
        }
    }

    /// The backend of the testbed that represents this backend of the checklist. If a packet case
    /// excludes the testbed's backend, the case does not test its rows for the checklist's backend.
    #[must_use]
    pub fn backend(self) -> Backend {
        match self {
            Self::Iptables => Backend::IptablesLegacy,
            Self::Ipvs => Backend::Ipvs,
            Self::Nftables => Backend::Nftables,
            Self::Userspace => Backend::Userspace,
        }
    }
}

/// A section of the checklist.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// The heading.
    pub title: String,
    /// The rows, in order.
    pub rows: Vec<Row>,
}

/// A behaviour.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// The number by which tests refer to the row.
    pub number: u8,
    /// The expected behaviour.
    pub behaviour: String,
    /// For each backend, the reason why it needs no test of this row, or a description of how it
    /// differs from the row, if any.
    #[serde(default, rename = "except")]
    exceptions: BTreeMap<String, String>,
}

impl Row {
    /// The reason why a backend needs no test of this row, or a description of how the backend
    /// differs from the row, if any.
    #[must_use]
    pub fn reason(&self, column: Column) -> Option<&str> {
        self.exceptions.get(column.name()).map(String::as_str)
    }
}

/// All rows.
pub static SECTIONS: LazyLock<Vec<Section>> =
    LazyLock::new(|| serde_saphyr::from_str(include_str!("rows.yaml")).expect("rows.yaml is not the checklist"));

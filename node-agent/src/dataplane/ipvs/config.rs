//! The configuration of the IPVS dataplane.

use headgate_core::{Family, view::MasqueradeConfig};

use super::super::xtables::Variant;
use headgate_settings::IpvsSettings;

/// The configuration of the IPVS dataplane.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IpvsOptions {
    /// The variant of iptables that writes the rules, such as the masquerade rules.
    pub variant: Variant,
    /// Which connections are masqueraded, and with which mark.
    pub masquerade: MasqueradeConfig,
    /// The operator's settings of mode ipvs.
    pub settings: IpvsSettings,
    /// Families to program, if the node supports them.
    pub families: Vec<Family>,
}

impl Default for IpvsOptions {
    fn default() -> Self {
        Self {
            variant: Variant::Auto,
            masquerade: MasqueradeConfig::default(),
            settings: IpvsSettings::default(),
            families: Family::BOTH.to_vec(),
        }
    }
}

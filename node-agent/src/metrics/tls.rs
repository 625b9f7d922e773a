//! What is counted of TLS.

use std::sync::atomic::AtomicI64;

use headgate_tls::{Loaded, Validity};
use prometheus_client::{
    encoding::EncodeLabelSet,
    metrics::{counter::Counter, family::Family, gauge::Gauge},
    registry::{Registry, Unit},
};
use tokio::sync::watch;

use super::{Catalogue, KindLabel};

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FileLabel {
    file: &'static str,
}

/// See the module.
#[derive(Debug, Default)]
pub struct TlsMetrics {
    handshakes: Family<KindLabel, Counter>,
    reloads: Family<ResultLabel, Counter>,
    not_after: Family<FileLabel, Gauge<i64, AtomicI64>>,
    problem: watch::Sender<Option<String>>,
}

impl TlsMetrics {
    pub(super) fn register(&self, catalogue: &mut Catalogue, registry: &mut Registry) {
        let mut add = catalogue.adder("headgate_agent", registry);
        let help = "TLS handshakes with control planes that were done, by kind";
        add.counter("tls_handshakes", "kind (full, resumed)", help, self.handshakes.clone());
        let help = "Times that other TLS files were taken up, or had to be refused";
        add.counter("tls_reloads", "result (success, failure)", help, self.reloads.clone());
        let help =
            "When what is in use expires, in seconds since 1970: the own certificate, the first of the authorities";
        add.gauge_in(Unit::Seconds, "tls_certificate_not_after", "file (cert, ca)", help, self.not_after.clone());
    }

    /// Files were taken up; the first ones are not counted as a reload.
    pub(crate) fn loaded<C>(&self, loaded: &Loaded<C>, is_first: bool) {
        if !is_first {
            self.reloads.get_or_create(&ResultLabel { result: "success" }).inc();
        }
        let authorities = Validity { not_after: loaded.authorities_not_after, ..loaded.validity };
        for (file, validity) in [("cert", loaded.validity), ("ca", authorities)] {
            self.not_after.get_or_create(&FileLabel { file }).set(validity.not_after_unix_seconds());
        }
        self.problem.send_replace(None);
    }

    /// Files cannot be used.
    pub(crate) fn refused(&self, problem: String) {
        self.reloads.get_or_create(&ResultLabel { result: "failure" }).inc();
        self.problem.send_replace(Some(problem));
    }

    /// A handshake was done.
    pub(crate) fn handshake(&self, is_resumed: bool) {
        let kind = if is_resumed { "resumed" } else { "full" };
        self.handshakes.get_or_create(&KindLabel { kind }).inc();
    }

    /// What is wrong with the files as they are now.
    #[must_use]
    pub fn problem(&self) -> Option<String> {
        self.problem.borrow().clone()
    }

    /// Follows what is wrong with the files.
    pub(crate) fn watch_problem(&self) -> watch::Receiver<Option<String>> {
        self.problem.subscribe()
    }
}

//! The command line.

use std::{net::SocketAddr, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use headgate_core::{
    Family,
    masquerade::{LocalDetector, MasqueradeConfig},
};
use ipnet::IpNet;

use crate::{
    backend::iptables::Variant,
    session::connect::{AddressError, ControlPlane, TlsFiles},
};

/// A combination of options that cannot be used. Names the option and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OptionsError {
    /// No host name either.
    #[error("--node-name: {0}; pass the Kubernetes name of this node")]
    NodeName(String),
    /// An address of a control plane.
    #[error("--control-plane: {0}")]
    ControlPlane(#[from] AddressError),
    /// TLS files are missing.
    #[error("--control-plane names an https URL, which needs --tls-cert, --tls-key and --tls-ca; missing: {0}")]
    TlsFilesMissing(String),
    /// Two CIDRs of one family.
    #[error("--cluster-cidr: {0} and {1} are both {2}; pass one CIDR per family, such as 10.0.0.0/8,fd00::/48")]
    TwoCidrs(IpNet, IpNet, Family),
}

/// How the kernel is programmed. Later modes are refused by name until they exist.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProxyMode {
    /// The best that the node can run.
    #[default]
    Auto,
    /// iptables rules.
    Iptables,
}

impl FromStr for ProxyMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(Self::Auto),
            "iptables" => Ok(Self::Iptables),
            other => Err(format!("mode {other} is not built yet; pass auto or iptables")),
        }
    }
}

/// Programs this node's kernel with the Services that a Headgate control plane streams to it.
///
/// Rules stay in place when the agent stops; `--cleanup` removes them.
#[derive(Debug, Clone, clap::Parser)]
#[command(name = "headgate-node-agent", version)]
pub struct Options {
    /// Kubernetes name of this node. Default: the host name in lower case
    #[arg(long, value_name = "NAME", env = "HEADGATE_NODE_NAME")]
    pub node_name: Option<String>,

    /// Control plane replicas, any of which will do: https://HOST:7443, or http://ADDRESS:PORT together with
    /// --insecure-loopback. Repeat, or separate by commas
    #[arg(
        long,
        value_name = "URL",
        value_delimiter = ',',
        required_unless_present = "cleanup",
        env = "HEADGATE_CONTROL_PLANE"
    )]
    pub control_plane: Vec<String>,

    /// Allow http URLs without TLS, on loopback and test addresses only
    #[arg(long)]
    pub insecure_loopback: bool,

    /// PEM file with this agent's certificate (chain). Read anew at each connection
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,

    /// PEM file with the certificate's private key
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,

    /// PEM file with the authorities that sign control planes' certificates
    #[arg(long, value_name = "FILE")]
    pub tls_ca: Option<PathBuf>,

    /// How to program the kernel
    #[arg(long, value_name = "MODE", default_value = "auto",
        value_parser = PossibleValuesParser::new(["auto", "iptables", "ipvs", "nftables", "userspace"]).try_map(|mode| mode.parse::<ProxyMode>()))]
    pub proxy_mode: ProxyMode,

    /// Which iptables to use; auto takes the one that this node uses already
    #[arg(long, value_enum, default_value = "auto")]
    pub iptables_variant: Variant,

    /// Range of pod addresses, one per family. Traffic to ClusterIPs from elsewhere is masqueraded. Without it none is
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    pub cluster_cidr: Vec<IpNet>,

    /// Masquerade everything that is sent to ClusterIPs
    #[arg(long)]
    pub masquerade_all: bool,

    /// Bit of the packet mark that asks for masquerading
    #[arg(long = "iptables-masquerade-bit", value_name = "N", default_value_t = 14, value_parser = clap::value_parser!(u8).range(0..=31))]
    pub masquerade_bit: u8,

    /// Shortest time between two syncs; changes in between are gathered
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    pub min_sync_period: Duration,

    /// Time between two looks at whether somebody else removed our rules
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = positive_duration)]
    pub sync_period: Duration,

    /// Where /metrics, /healthz and /proxyMode are served
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:10249")]
    pub metrics_bind_address: SocketAddr,

    /// Remove every rule that any backend of Headgate made on this node, and exit
    #[arg(long)]
    pub cleanup: bool,

    /// What to log, such as info or headgate_node_agent=debug
    #[arg(long, value_name = "FILTER", default_value = "info", env = "HEADGATE_LOG")]
    pub log: String,
}

impl Options {
    /// The node's name, lower case.
    ///
    /// # Errors
    /// When none was given and the host has none, or it is not a DNS name.
    pub fn node_name(&self) -> Result<Arc<str>, OptionsError> {
        let name = match &self.node_name {
            Some(name) => name.clone(),
            None => std::fs::read_to_string("/proc/sys/kernel/hostname")
                .map_err(|error| OptionsError::NodeName(format!("the host name cannot be read ({error})")))?,
        };
        let name = name.trim().to_ascii_lowercase();
        let is_dns = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '.';
        if name.is_empty() || name.len() > 253 || !name.chars().all(is_dns) {
            return Err(OptionsError::NodeName(format!("{name:?} is not a DNS name of 1 to 253 characters")));
        }
        Ok(name.into())
    }

    /// The control planes to try, and the files for TLS when one of them needs it.
    ///
    /// # Errors
    /// A URL cannot be used, or may not be used without TLS, or a file's name is missing.
    pub fn control_planes(&self) -> Result<(Vec<ControlPlane>, Option<TlsFiles>), OptionsError> {
        let parse = |url: &String| ControlPlane::parse(url, self.insecure_loopback);
        let targets: Vec<ControlPlane> = self.control_plane.iter().map(parse).collect::<Result<_, _>>()?;
        if !targets.iter().any(ControlPlane::uses_tls) {
            return Ok((targets, None));
        }
        if let (Some(cert), Some(key), Some(ca)) = (&self.tls_cert, &self.tls_key, &self.tls_ca) {
            return Ok((targets, Some(TlsFiles { cert: cert.clone(), key: key.clone(), ca: ca.clone() })));
        }
        let files = [("--tls-cert", &self.tls_cert), ("--tls-key", &self.tls_key), ("--tls-ca", &self.tls_ca)];
        let missing: Vec<&str> = files.iter().filter(|(_, file)| file.is_none()).map(|(name, _)| *name).collect();
        Err(OptionsError::TlsFilesMissing(missing.join(", ")))
    }

    /// What was configured about masquerading.
    ///
    /// # Errors
    /// Two CIDRs are of one family.
    pub fn masquerade(&self) -> Result<MasqueradeConfig, OptionsError> {
        let of = |family| {
            let mut cidrs = self.cluster_cidr.iter().filter(move |cidr| Family::of(cidr.addr()) == family);
            match (cidrs.next(), cidrs.next()) {
                (Some(one), Some(two)) => Err(OptionsError::TwoCidrs(*one, *two, family)),
                (one, _) => Ok(one.map(|cidr| LocalDetector::Cidr(*cidr))),
            }
        };
        let (detector_v4, detector_v6) = (of(Family::V4)?, of(Family::V6)?);
        Ok(MasqueradeConfig { all: self.masquerade_all, bit: self.masquerade_bit, detector_v4, detector_v6 })
    }
}

/// A duration such as `500ms`, `30s`, `5m` or `1h`, or a plain `0`.
fn duration(text: &str) -> Result<Duration, String> {
    let help = || format!("{text:?} is not a duration such as 500ms, 30s, 5m or 1h");
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| help())?;
    let milliseconds = match unit {
        "ms" => Some(1),
        "s" => Some(1000),
        "m" => Some(60_000),
        "h" => Some(3_600_000),
        "" if number == 0 => Some(0),
        _ => None,
    };
    milliseconds.and_then(|unit: u64| number.checked_mul(unit)).map(Duration::from_millis).ok_or_else(help)
}

fn positive_duration(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() { Err("must be more than zero, such as 30s".into()) } else { Ok(duration) }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use clap::Parser as _;

    use super::*;

    fn parse(arguments: &[&str]) -> Result<Options, String> {
        let head = ["headgate-node-agent"];
        Options::try_parse_from(head.iter().chain(arguments)).map_err(|error| error.to_string())
    }

    #[test]
    fn modes_to_come_are_refused_by_name() {
        let error = parse(&["--control-plane=https://a:1", "--proxy-mode=ipvs"]).unwrap_err();
        assert!(error.contains("mode ipvs is not built yet; pass auto or iptables"), "{error}");
        let options = parse(&["--control-plane=https://a:1", "--proxy-mode=iptables"]).unwrap();
        assert_eq!(options.proxy_mode, ProxyMode::Iptables);
    }

    #[test]
    fn a_control_plane_is_needed_except_for_cleanup() {
        assert!(parse(&[]).unwrap_err().contains("--control-plane"));
        assert!(parse(&["--cleanup"]).unwrap().cleanup);
    }

    #[test]
    fn tls_files_that_are_missing_are_named() {
        let options = parse(&["--control-plane=https://a:1", "--tls-key=/k"]).unwrap();
        let error = options.control_planes().unwrap_err().to_string();
        assert!(error.ends_with("missing: --tls-cert, --tls-ca"), "{error}");
    }

    #[test]
    fn plaintext_needs_the_flag_and_an_address() {
        let refused = |arguments: &[&str]| parse(arguments).unwrap().control_planes().unwrap_err().to_string();
        assert!(refused(&["--control-plane=http://127.0.0.1:1"]).contains("--insecure-loopback"));
        assert!(refused(&["--control-plane=http://10.0.0.1:1", "--insecure-loopback"]).contains("10.0.0.1"));
        assert!(refused(&["--control-plane=http://localhost:1", "--insecure-loopback"]).contains("localhost"));
        let two = parse(&["--control-plane=http://[::1]:1,http://198.18.0.1:2", "--insecure-loopback"]).unwrap();
        assert_eq!(two.control_planes().unwrap().0.len(), 2);
    }

    #[test]
    fn one_cidr_a_family() {
        let two = parse(&["--cleanup", "--cluster-cidr=10.0.0.0/8,10.1.0.0/16"]).unwrap();
        assert!(two.masquerade().unwrap_err().to_string().contains("one CIDR per family"));
        let both = parse(&["--cleanup", "--cluster-cidr=10.0.0.0/8,fd00::/48"]).unwrap().masquerade().unwrap();
        assert!(both.detector_v4.is_some() && both.detector_v6.is_some());
    }

    #[test]
    fn node_names_are_lower_case_dns_names() {
        let name = |name: &str| parse(&["--cleanup", "--node-name", name]).unwrap().node_name();
        assert_eq!(&*name(" Node-1.Example ").unwrap(), "node-1.example");
        assert!(name("").is_err() && name("a b").is_err());
        assert!(parse(&["--cleanup"]).unwrap().node_name().is_ok());
    }

    #[test]
    fn durations() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("0"), Ok(Duration::ZERO));
        assert_eq!(duration("2m"), Ok(Duration::from_secs(120)));
        assert!(duration("5").is_err() && duration("s").is_err() && duration("99999999999999999h").is_err());
        assert!(positive_duration("0s").is_err());
    }

    #[test]
    fn masquerade_bit_is_a_bit() {
        assert!(parse(&["--cleanup", "--iptables-masquerade-bit=32"]).is_err());
        assert_eq!(parse(&["--cleanup"]).unwrap().masquerade().unwrap().mark(), 0x4000);
    }
}

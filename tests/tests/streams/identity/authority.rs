//! Certificate authorities, and the certificates that they issue. Callers can change the parameters
//! of a certificate before it is signed, for example to issue an expired certificate.

use std::{fs, path::Path, sync::Arc, time::SystemTime};

use headgate_control_plane::serve::tls::ServerTls;
use headgate_tls::{Files, Side};
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
};
use rustls::pki_types::CertificateDer;

pub(crate) struct Authority(CertifiedIssuer<'static, KeyPair>);

/// A certificate and its key, in PEM.
pub(crate) struct Pair {
    pub(crate) certificate: String,
    pub(crate) key: String,
    pub(crate) der: CertificateDer<'static>,
}

impl Authority {
    pub(crate) fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
    }

    pub(crate) fn pem(&self) -> String {
        self.0.pem()
    }

    /// The key of the authority, in PEM.
    pub(crate) fn key(&self) -> String {
        self.0.key().serialize_pem()
    }

    pub(crate) fn der(&self) -> CertificateDer<'static> {
        self.0.der().clone()
    }

    pub(crate) fn issue(&self, change: impl FnOnce(&mut CertificateParams)) -> Pair {
        let mut params = CertificateParams::default();
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.0).unwrap();
        Pair { certificate: certificate.pem(), key: key.serialize_pem(), der: certificate.der().clone() }
    }

    /// Issues a client certificate with these URIs.
    pub(crate) fn client(&self, uris: &[&str], change: impl FnOnce(&mut CertificateParams)) -> Pair {
        self.issue(|params| {
            params.subject_alt_names = uris.iter().map(|uri| SanType::URI((*uri).try_into().unwrap())).collect();
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            change(params);
        })
    }

    pub(crate) fn node(&self, name: &str) -> Pair {
        self.client(&[&format!("headgate://node/{name}")], |_| {})
    }

    /// Issues a client certificate with the same names as a kubelet's certificate.
    pub(crate) fn kubelet(&self, node: &str) -> Pair {
        self.issue(|params| {
            params.distinguished_name.push(DnType::CommonName, format!("system:node:{node}"));
            params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        })
    }

    pub(crate) fn server(&self, change: impl FnOnce(&mut CertificateParams)) -> Pair {
        self.issue(|params| {
            let uri = SanType::URI("headgate://replica/test".try_into().unwrap());
            params.subject_alt_names = vec![SanType::IpAddress([127, 0, 0, 1].into()), uri];
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
            change(params);
        })
    }
}

/// The TLS files in `folder`, loaded as the control plane loads them. The files `node-ca.crt` and
/// `denied` are used if they exist.
pub(crate) fn load(folder: &Path) -> Arc<ServerTls> {
    let [cert, key, ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
    let [node_ca, denied] = ["node-ca.crt", "denied"].map(|name| Some(folder.join(name)).filter(|file| file.exists()));
    let node_ca = node_ca.unwrap_or_else(|| ca.clone());
    ServerTls::load(Files { side: Side::Server, cert, key, ca, node_ca, denied }).unwrap()
}

impl Pair {
    /// Writes `tls.crt`, `tls.key`, and `ca.crt` with these authorities.
    pub(crate) fn write(&self, folder: &Path, authorities: &[&Authority]) {
        fs::create_dir_all(folder).unwrap();
        let authorities: String = authorities.iter().map(|authority| authority.pem()).collect();
        for (name, text) in [("tls.crt", &self.certificate), ("tls.key", &self.key), ("ca.crt", &authorities)] {
            fs::write(folder.join(name), text).unwrap();
        }
    }
}

pub(crate) fn in_seconds(seconds: u64) -> SystemTime {
    SystemTime::now() + std::time::Duration::from_secs(seconds)
}

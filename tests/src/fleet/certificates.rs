//! A certificate authority, and certificates for thousands of nodes. All node certificates share
//! one key, because generating thousands of keys takes a long time.

use std::{fs, net::IpAddr, path::Path, sync::Arc};

use anyhow::{Context as _, Result};
use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use rustls::{
    ClientConfig, RootCertStore,
    client::{Resumption, WebPkiServerVerifier},
    crypto::ring,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
    sign::{CertifiedKey, SigningKey, SingleCertAndKey},
    version::TLS13,
};

/// The name in the replicas' certificates.
const SERVER_NAME: &str = "control-plane";
/// The number of session tickets that an agent keeps.
const TICKETS: usize = 8;

/// A certificate authority.
pub struct Authority {
    certificate: Certificate,
    issuer: Issuer<'static, KeyPair>,
    node_key: KeyPair,
    signing_key: Arc<dyn SigningKey>,
    verifier: Arc<WebPkiServerVerifier>,
}

/// The files for a replica's `--tls-…` options.
#[derive(Debug, Clone)]
pub struct ServerFiles {
    /// The file for `--tls-cert`.
    pub cert: std::path::PathBuf,
    /// The file for `--tls-key`.
    pub key: std::path::PathBuf,
    /// The file for `--tls-client-ca`.
    pub client_ca: std::path::PathBuf,
}

impl Authority {
    /// Creates an authority.
    ///
    /// # Errors
    /// The cryptographic library fails.
    pub fn new() -> Result<Self> {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, "fleet authority");
        let key = KeyPair::generate()?;
        let certificate = parameters.self_signed(&key)?;
        let node_key = KeyPair::generate()?;
        let provider = Arc::new(ring::default_provider());
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(node_key.serialize_der()));
        let signing_key = provider.key_provider.load_private_key(der)?;
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone())?;
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build()?;
        Ok(Self { certificate, issuer: Issuer::new(parameters, key), node_key, signing_key, verifier })
    }

    fn sign(&self, common_name: &str, names: Vec<SanType>, key: &KeyPair) -> Result<Certificate> {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, common_name);
        parameters.subject_alt_names = names;
        Ok(parameters.signed_by(key, &self.issuer)?)
    }

    /// Writes the files of replicas with this address into `folder`. The replicas may ask each
    /// other.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write_server_files(&self, folder: &Path, address: IpAddr) -> Result<ServerFiles> {
        let key = KeyPair::generate()?;
        let role = SanType::URI("headgate://replica/fleet".try_into()?);
        let names = vec![SanType::DnsName(SERVER_NAME.try_into()?), SanType::IpAddress(address), role];
        let certificate = self.sign("control plane", names, &key)?;
        let file = |name: &str, text: String| {
            let path = folder.join(name);
            fs::write(&path, text).with_context(|| format!("writing {}", path.display())).map(|()| path)
        };
        Ok(ServerFiles {
            cert: file("tls.crt", certificate.pem())?,
            key: file("tls.key", key.serialize_pem())?,
            client_ca: file("ca.crt", self.certificate.pem())?,
        })
    }

    /// Writes the certificate and the key of a client that may use `Inspect` into `folder`. Returns
    /// their paths.
    pub(super) fn write_reader_files(&self, folder: &Path) -> Result<[std::path::PathBuf; 2]> {
        let key = KeyPair::generate()?;
        let certificate = self.sign("reader", vec![SanType::URI("headgate://reader/page".try_into()?)], &key)?;
        let files = [folder.join("reader.crt"), folder.join("reader.key")];
        for (file, text) in files.iter().zip([certificate.pem(), key.serialize_pem()]) {
            fs::write(file, text).with_context(|| format!("writing {}", file.display()))?;
        }
        Ok(files)
    }

    /// The TLS configuration of an agent: TLS 1.3, a certificate for its node, and a store for
    /// session tickets.
    ///
    /// # Errors
    /// The node's name cannot be part of a URI.
    pub(super) fn client_config(&self, node: &str) -> Result<Arc<ClientConfig>> {
        let name = SanType::URI(format!("headgate://node/{node}").as_str().try_into()?);
        let certificate = self.sign("node agent", vec![name], &self.node_key)?;
        let pair = CertifiedKey::new(vec![certificate.der().clone()], Arc::clone(&self.signing_key));
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let mut config = builder
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            // All agents share the library's verifier.
            .with_custom_certificate_verifier(Arc::<WebPkiServerVerifier>::clone(&self.verifier))
            .with_client_cert_resolver(Arc::new(SingleCertAndKey::from(pair)));
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.resumption = Resumption::in_memory_sessions(TICKETS);
        Ok(Arc::new(config))
    }

    /// The name that agents expect in a replica's certificate.
    pub(super) fn server_name() -> Result<ServerName<'static>> {
        Ok(ServerName::try_from(SERVER_NAME)?)
    }
}

//! The files of one side of a connection, read and checked.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::{CertifiedKey, SingleCertAndKey},
};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::{
    denied::Denied,
    replica::{replica_verifier, replicas_in},
    validity::{Validity, date},
};

/// The maximum size of a file. A bundle of a thousand authorities is smaller.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// The side of a connection that uses the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Accepts connections.
    Server,
    /// Opens connections.
    Client,
}

impl Side {
    /// The option that names the file with the other side's authorities.
    pub fn ca_option(self) -> &'static str {
        match self {
            Self::Server => "--tls-client-ca",
            Self::Client => "--tls-ca",
        }
    }
}

/// The files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The side that uses the files.
    pub side: Side,
    /// This side's certificate, followed by its chain (`--tls-cert`).
    pub cert: PathBuf,
    /// The private key of the certificate (`--tls-key`).
    pub key: PathBuf,
    /// The authorities that may sign the other side's certificate.
    pub ca: PathBuf,
    /// For a server: the authorities that may sign the certificates of nodes, and nothing else
    /// (`--tls-node-ca`). The same as `ca` if these also sign for nodes.
    pub node_ca: PathBuf,
    /// For a server: the holders and certificates that are denied (`--tls-denied`).
    pub denied: Option<PathBuf>,
}

/// A file cannot be used. Retry after the file has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{option} {}: {problem}; {remedy}", .file.display())]
pub struct FileError {
    /// The option that names the file.
    pub option: &'static str,
    /// The path of the file.
    pub file: PathBuf,
    /// The fault.
    pub problem: String,
    /// The remedy.
    pub remedy: String,
}

/// The contents of the files as read. The type has no debug output, which would contain the key.
#[derive(PartialEq, Eq)]
pub(crate) struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
    node_ca: Vec<u8>,
    denied: Vec<u8>,
}

/// The checked contents of the files: complete, with matching certificate and key, suitable for
/// this side, and valid now.
#[derive(Debug)]
pub struct Material {
    /// This side's certificate chain and key.
    pub own: Arc<CertifiedKey>,
    /// The trusted authorities.
    pub authorities: RootCertStore,
    /// The authorities that sign for nodes.
    pub node_authorities: RootCertStore,
    /// The holders and certificates that are denied.
    pub denied: Denied,
    /// The validity of this side's certificate.
    pub validity: Validity,
    /// The time at which the first authority expires.
    pub authorities_not_after: SystemTime,
}

/// The configuration of a client that calls replicas over HTTP/2. Errors: the cryptographic
/// provider lacks an algorithm.
pub fn replica_client(material: &Material) -> Result<ClientConfig, rustls::Error> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let verifier = replica_verifier(material.authorities.clone(), material.denied.clone());
    let builder = builder.with_safe_default_protocol_versions()?.dangerous().with_custom_certificate_verifier(verifier);
    let own = Arc::new(SingleCertAndKey::from(Arc::clone(&material.own)));
    let mut config = builder.with_client_cert_resolver(own);
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(config)
}

struct PemFile<'a> {
    option: &'static str,
    path: &'a Path,
    expected: &'static str,
}

impl PemFile<'_> {
    fn fault(&self, problem: String, remedy: impl Into<String>) -> FileError {
        FileError { option: self.option, file: self.path.to_owned(), problem, remedy: remedy.into() }
    }

    fn malformed(&self, problem: &dyn fmt::Display) -> FileError {
        self.fault(problem.to_string(), format!("it must be a PEM file with {}", self.expected))
    }

    fn read(&self) -> Result<Vec<u8>, FileError> {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            // Opening a pipe would block until another program writes to it.
            if !fs::metadata(self.path)?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            File::open(self.path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error| {
            let remedy = format!("it must be a file with {} that this program may read", self.expected);
            self.fault(format!("cannot read the file: {error}"), remedy)
        })?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            return Err(self.malformed(&format!("it is larger than {MAX_FILE_BYTES} bytes")));
        }
        Ok(bytes)
    }

    fn certificates(&self, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, FileError> {
        let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| self.malformed(&error))?;
        if certificates.is_empty() {
            return Err(self.malformed(&"the file contains no certificate"));
        }
        Ok(certificates)
    }

    fn parse<'a>(&self, der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, FileError> {
        let parsed = X509Certificate::from_der(der).map(|(_, certificate)| certificate);
        parsed.map_err(|error| self.malformed(&format!("a certificate in the file is malformed: {error}")))
    }

    /// Reads the authorities of a file. Leaves out expired ones, which rustls would trust.
    fn authorities(&self, pem: &[u8], now: SystemTime) -> Result<(RootCertStore, SystemTime), FileError> {
        let mut roots = RootCertStore::empty();
        let (mut valid, mut expired) = (Vec::new(), Vec::new());
        for certificate in self.certificates(pem)? {
            let validity = Validity::of(&self.parse(&certificate)?);
            if validity.has_expired(now) {
                expired.push(validity.not_after);
                continue;
            }
            valid.push(validity.not_after);
            roots.add(certificate).map_err(|error| self.malformed(&error))?;
        }
        let not_after = valid.into_iter().min().ok_or_else(|| {
            let when = expired.into_iter().max().map(date).unwrap_or_default();
            let problem = format!("every authority in the file has expired, the last at {when}");
            self.fault(problem, "replace them, or check this machine's clock")
        })?;
        Ok((roots, not_after))
    }
}

impl Files {
    fn cert_file(&self) -> PemFile<'_> {
        PemFile { option: "--tls-cert", path: &self.cert, expected: "this program's certificate and its chain" }
    }

    fn key_file(&self) -> PemFile<'_> {
        PemFile { option: "--tls-key", path: &self.key, expected: "a private key (PKCS#8, PKCS#1 or SEC1)" }
    }

    fn ca_file(&self) -> PemFile<'_> {
        let expected = match self.side {
            Side::Server => "the authorities that sign clients' certificates",
            Side::Client => "the authorities that sign control planes' certificates",
        };
        PemFile { option: self.side.ca_option(), path: &self.ca, expected }
    }

    fn node_ca_file(&self) -> PemFile<'_> {
        let expected = "the authorities that sign nodes' certificates";
        PemFile { option: "--tls-node-ca", path: &self.node_ca, expected }
    }

    fn denied_file(&self) -> Option<PemFile<'_>> {
        let expected = "headgate://ROLE/NAME, serial=HEX or sha256 Fingerprint=HEX in each line";
        self.denied.as_ref().map(|path| PemFile { option: "--tls-denied", path, expected })
    }

    /// Reads the files. Blocks. Errors: returns the error of the first file that cannot be read.
    pub(crate) fn read(&self) -> Result<Contents, FileError> {
        let [cert, key, ca] = [self.cert_file(), self.key_file(), self.ca_file()].map(|file| file.read());
        let denied = self.denied_file().map_or_else(|| Ok(Vec::new()), |file| file.read())?;
        Ok(Contents { cert: cert?, key: key?, ca: ca?, node_ca: self.node_ca_file().read()?, denied })
    }

    /// Reads only the authorities. Leaves out expired authorities. Blocks.
    /// Errors: the file cannot be read, or contains no valid authority. Retry after it has changed.
    pub fn read_authorities(&self, now: SystemTime) -> Result<RootCertStore, FileError> {
        self.ca_file().authorities(&self.ca_file().read()?, now).map(|(roots, _)| roots)
    }

    /// Checks the contents of the files. Errors: returns the first fault of the files.
    pub(crate) fn check(&self, contents: &Contents, now: SystemTime) -> Result<Material, FileError> {
        let (authorities, not_after) = self.ca_file().authorities(&contents.ca, now)?;
        let (node_authorities, nodes_not_after) = self.node_ca_file().authorities(&contents.node_ca, now)?;
        let denied = Denied::parse(&String::from_utf8_lossy(&contents.denied));
        let denied = denied.or_else(|problem| match self.denied_file() {
            Some(file) => Err(file.fault(problem, format!("write {}", file.expected))),
            None => Ok(Denied::default()),
        })?;
        let chain = self.cert_file().certificates(&contents.cert)?;
        let validity = self.check_own(&chain[0], now)?;
        let file = self.key_file();
        let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|error| file.malformed(&error))?;
        let own = CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| {
            let problem = format!("it is not the key of --tls-cert {}: {error}", self.cert.display());
            file.fault(problem, "use the private key of the certificate")
        })?;
        let (own, authorities_not_after) = (Arc::new(own), not_after.min(nodes_not_after));
        Ok(Material { own, authorities, node_authorities, denied, validity, authorities_not_after })
    }

    fn check_own(&self, certificate: &CertificateDer<'_>, now: SystemTime) -> Result<Validity, FileError> {
        let file = self.cert_file();
        let parsed = file.parse(certificate)?;
        let validity = Validity::of(&parsed);
        if validity.has_expired(now) {
            let problem = format!("the certificate expired at {}", date(validity.not_after));
            return Err(file.fault(problem, "renew it, or check this machine's clock"));
        }
        if now < validity.not_before {
            let problem = format!("the certificate is not valid before {}", date(validity.not_before));
            return Err(file.fault(problem, "check this machine's clock, or wait"));
        }
        let is_server = self.side == Side::Server;
        let usage = if is_server { "serverAuth" } else { "clientAuth" };
        let usages = parsed.extended_key_usage().map_err(|error| file.malformed(&error))?.map(|usages| usages.value);
        if !usages.is_none_or(|of| of.any || if is_server { of.server_auth } else { of.client_auth }) {
            let remedy = format!("issue a new certificate with the extended key usage {usage}");
            return Err(file.fault(format!("the certificate's extended key usage lacks {usage}"), remedy));
        }
        let names = parsed.subject_alternative_name().map_err(|error| file.malformed(&error))?;
        let mut names = names.iter().flat_map(|extension| &extension.value.general_names);
        let has_address = names.any(|name| matches!(name, GeneralName::DNSName(_) | GeneralName::IPAddress(_)));
        if is_server && !has_address {
            let problem = "the certificate names no address in its subject alternative names".to_owned();
            let remedy = "issue a new certificate with the DNS names and IP addresses that agents connect to";
            return Err(file.fault(problem, remedy));
        }
        if is_server && replicas_in(&parsed).is_empty() {
            let problem = "the certificate names no replica, so agents would refuse it".to_owned();
            let remedy =
                "issue a new certificate with the URI headgate://replica/NAME in its subject alternative names";
            return Err(file.fault(problem, remedy));
        }
        Ok(validity)
    }
}

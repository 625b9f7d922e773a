//! The three PEM files of one side of a connection, read and checked.

use std::{
    fmt,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use rustls::{
    RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    sign::CertifiedKey,
};
use x509_parser::prelude::{FromDer as _, GeneralName, X509Certificate};

use crate::validity::{Validity, date};

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
    #[must_use]
    pub fn ca_option(self) -> &'static str {
        match self {
            Self::Server => "--tls-client-ca",
            Self::Client => "--tls-ca",
        }
    }
}

/// The three files.
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

/// The contents of the files as read.
#[derive(PartialEq, Eq)]
pub(crate) struct Contents {
    cert: Vec<u8>,
    key: Vec<u8>,
    ca: Vec<u8>,
}

impl fmt::Debug for Contents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Debug output must not contain the key.
        f.debug_struct("Contents").finish_non_exhaustive()
    }
}

/// The checked contents of the files: complete, with matching certificate and key, suitable for
/// this side, and valid now.
#[derive(Debug)]
pub struct Material {
    /// This side's certificate chain and key.
    pub own: Arc<CertifiedKey>,
    /// The trusted authorities.
    pub authorities: RootCertStore,
    /// The validity of this side's certificate.
    pub validity: Validity,
    /// The time at which the first authority expires.
    pub authorities_not_after: SystemTime,
}

impl Files {
    /// Reads the three files. Blocks.
    ///
    /// # Errors
    ///
    /// Returns the error of the first file that cannot be read.
    pub(crate) fn read(&self) -> Result<Contents, FileError> {
        Ok(Contents {
            cert: self.read_one("--tls-cert", &self.cert)?,
            key: self.read_one("--tls-key", &self.key)?,
            ca: self.read_one(self.side.ca_option(), &self.ca)?,
        })
    }

    /// Reads only the authorities. Leaves out expired authorities. Blocks.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or contains no valid authority. Retry after the file has changed.
    pub fn read_authorities(&self, now: SystemTime) -> Result<RootCertStore, FileError> {
        let pem = self.read_one(self.side.ca_option(), &self.ca)?;
        self.authorities(&pem, now).map(|(roots, _)| roots)
    }

    fn read_one(&self, option: &'static str, file: &Path) -> Result<Vec<u8>, FileError> {
        let read = || -> io::Result<Vec<u8>> {
            let mut bytes = Vec::new();
            // Opening a pipe would block until another program writes to it.
            if !fs::metadata(file)?.is_file() {
                return Err(io::Error::other("it is not a regular file"));
            }
            File::open(file)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        let bytes = read().map_err(|error| {
            let remedy = format!("it must be a PEM file with {} that this program may read", self.expected(option));
            fault(option, file, format!("cannot read the file: {error}"), remedy)
        })?;
        if bytes.len() as u64 > MAX_FILE_BYTES {
            let problem = format!("it is larger than {MAX_FILE_BYTES} bytes");
            return Err(fault(option, file, problem, format!("it must be a PEM file with {}", self.expected(option))));
        }
        Ok(bytes)
    }

    fn expected(&self, option: &'static str) -> &'static str {
        match option {
            "--tls-key" => "a private key (PKCS#8, PKCS#1 or SEC1)",
            "--tls-cert" => "this program's certificate and its chain",
            _ => match self.side {
                Side::Server => "the authorities that sign clients' certificates",
                Side::Client => "the authorities that sign control planes' certificates",
            },
        }
    }

    /// Checks the contents of the files.
    ///
    /// # Errors
    ///
    /// Returns the first fault of the files.
    pub(crate) fn check(&self, contents: &Contents, now: SystemTime) -> Result<Material, FileError> {
        let (authorities, authorities_not_after) = self.authorities(&contents.ca, now)?;
        let chain = self.certificates("--tls-cert", &self.cert, &contents.cert)?;
        let validity = self.check_own(&chain[0], now)?;
        let key = PrivateKeyDer::from_pem_slice(&contents.key).map_err(|error| {
            let remedy = format!("it must be a PEM file with {}", self.expected("--tls-key"));
            fault("--tls-key", &self.key, error.to_string(), remedy)
        })?;
        let own = CertifiedKey::from_der(chain, key, &ring::default_provider()).map_err(|error| {
            let problem = format!("it is not the key of --tls-cert {}: {error}", self.cert.display());
            fault("--tls-key", &self.key, problem, "use the private key of the certificate".into())
        })?;
        Ok(Material { own: Arc::new(own), authorities, validity, authorities_not_after })
    }

    /// Reads the authorities. Leaves out expired authorities, because rustls would trust an expired
    /// authority.
    fn authorities(&self, pem: &[u8], now: SystemTime) -> Result<(RootCertStore, SystemTime), FileError> {
        let (option, file) = (self.side.ca_option(), &self.ca);
        let mut roots = RootCertStore::empty();
        let (mut first, mut last_expired) = (None, None);
        for certificate in self.certificates(option, file, pem)? {
            let validity = self.parse(option, file, &certificate).map(|parsed| Validity::of(&parsed))?;
            if validity.has_expired(now) {
                last_expired = last_expired.max(Some(validity.not_after));
                continue;
            }
            first = Some(first.map_or(validity.not_after, |first: SystemTime| first.min(validity.not_after)));
            roots.add(certificate).map_err(|error| self.malformed(option, file, &error.to_string()))?;
        }
        match (first, last_expired) {
            (Some(first), _) => Ok((roots, first)),
            (None, expired) => {
                let when = expired.map(date).unwrap_or_default();
                let problem = format!("every authority in the file has expired, the last at {when}");
                Err(fault(option, file, problem, "replace them, or check this machine's clock".into()))
            }
        }
    }

    fn check_own(&self, certificate: &CertificateDer<'_>, now: SystemTime) -> Result<Validity, FileError> {
        let (option, file) = ("--tls-cert", &self.cert);
        let parsed = self.parse(option, file, certificate)?;
        let fail = |problem: String, remedy: &str| Err(fault(option, file, problem, remedy.to_owned()));
        let validity = Validity::of(&parsed);
        if validity.has_expired(now) {
            let problem = format!("the certificate expired at {}", date(validity.not_after));
            return fail(problem, "renew it, or check this machine's clock");
        }
        if now < validity.not_before {
            let problem = format!("the certificate is not valid before {}", date(validity.not_before));
            return fail(problem, "check this machine's clock, or wait");
        }
        let malformed = |error: x509_parser::error::X509Error| self.malformed(option, file, &error.to_string());
        let (usage, remedy) = match self.side {
            Side::Server => ("serverAuth", "issue a new certificate with the extended key usage serverAuth"),
            Side::Client => ("clientAuth", "issue a new certificate with the extended key usage clientAuth"),
        };
        let allows = parsed.extended_key_usage().map_err(malformed)?.is_none_or(|extension| {
            let value = extension.value;
            value.any || if self.side == Side::Server { value.server_auth } else { value.client_auth }
        });
        if !allows {
            return fail(format!("the certificate's extended key usage lacks {usage}"), remedy);
        }
        let names = parsed.subject_alternative_name().map_err(malformed)?;
        let mut names = names.iter().flat_map(|extension| &extension.value.general_names);
        let has_address = names.any(|name| matches!(name, GeneralName::DNSName(_) | GeneralName::IPAddress(_)));
        if self.side == Side::Server && !has_address {
            let problem = "the certificate names no address in its subject alternative names".to_owned();
            return fail(problem, "issue a new certificate with the DNS names and IP addresses that agents connect to");
        }
        Ok(validity)
    }

    fn certificates(
        &self,
        option: &'static str,
        file: &Path,
        pem: &[u8],
    ) -> Result<Vec<CertificateDer<'static>>, FileError> {
        let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| self.malformed(option, file, &error.to_string()))?;
        if certificates.is_empty() {
            return Err(self.malformed(option, file, "the file contains no certificate"));
        }
        Ok(certificates)
    }

    fn parse<'a>(
        &self,
        option: &'static str,
        file: &Path,
        der: &'a CertificateDer<'_>,
    ) -> Result<X509Certificate<'a>, FileError> {
        let parsed = X509Certificate::from_der(der).map(|(_, certificate)| certificate);
        parsed
            .map_err(|error| self.malformed(option, file, &format!("a certificate in the file is malformed: {error}")))
    }

    fn malformed(&self, option: &'static str, file: &Path, problem: &str) -> FileError {
        fault(option, file, problem.to_owned(), format!("it must be a PEM file with {}", self.expected(option)))
    }
}

fn fault(option: &'static str, file: &Path, problem: String, remedy: String) -> FileError {
    FileError { option, file: file.to_owned(), problem, remedy }
}

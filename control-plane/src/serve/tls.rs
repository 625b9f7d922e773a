//! TLS from PEM files. What is missing, malformed or does not fit together is refused at start: there is no falling back.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};

/// The three files.
#[derive(Debug, Clone)]
pub struct TlsFiles {
    /// This replica's certificate, followed by its chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// Authorities that sign clients' certificates.
    pub client_ca: PathBuf,
}

/// A file that cannot be used. Names the option, the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// Not readable as PEM.
    #[error("{option} {file}: {problem}; it must be a PEM file with {expected}")]
    File {
        /// Option that named the file.
        option: &'static str,
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
        /// What should be in it.
        expected: &'static str,
    },
    /// Certificate and key are of different pairs, or of a kind that is not supported.
    #[error(
        "--tls-cert {cert} and --tls-key {key} do not fit together: {problem}; pass the key that the certificate was made for"
    )]
    Pair {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        problem: rustls::Error,
    },
    /// The cryptographic provider does not do what was asked of it.
    #[error("TLS: {0}")]
    Provider(String),
}

/// The server's side: TLS 1.2 and 1.3, HTTP/2 only, and a client certificate from everybody.
///
/// # Errors
///
/// [`TlsError`]; trying again does not help unless the files change.
pub fn server_config(files: &TlsFiles) -> Result<Arc<ServerConfig>, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let roots = roots(&files.client_ca)?;
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build();
    let verifier = verifier.map_err(|error| TlsError::Provider(error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| TlsError::Provider(error.to_string()))?.with_client_cert_verifier(verifier);
    let chain = certificates("--tls-cert", &files.cert)?;
    let key = PrivateKeyDer::from_pem_file(&files.key).map_err(|error| TlsError::File {
        option: "--tls-key",
        file: files.key.clone(),
        problem: error.to_string(),
        expected: "a private key (PKCS#8, PKCS#1 or SEC1)",
    })?;
    let pair = |problem| TlsError::Pair { cert: files.cert.clone(), key: files.key.clone(), problem };
    let mut config = builder.with_single_cert(chain, key).map_err(pair)?;
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(Arc::new(config))
}

fn roots(file: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates("--tls-client-ca", file)? {
        roots.add(certificate).map_err(|error| unusable("--tls-client-ca", file, error.to_string()))?;
    }
    Ok(roots)
}

fn certificates(option: &'static str, file: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let read = || CertificateDer::pem_file_iter(file)?.collect::<Result<Vec<_>, _>>();
    let certificates = read().map_err(|error| unusable(option, file, error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable(option, file, "no certificate in it".into()));
    }
    Ok(certificates)
}

fn unusable(option: &'static str, file: &Path, problem: String) -> TlsError {
    TlsError::File { option, file: file.to_owned(), problem, expected: "one certificate or more" }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    struct Folder {
        folder: tempfile::TempDir,
        files: TlsFiles,
    }

    fn folder() -> Folder {
        let folder = tempfile::tempdir().unwrap();
        let files = TlsFiles {
            cert: folder.path().join("tls.crt"),
            key: folder.path().join("tls.key"),
            client_ca: folder.path().join("ca.crt"),
        };
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
        fs::write(&files.cert, certificate.pem()).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        fs::write(&files.client_ca, certificate.pem()).unwrap();
        Folder { folder, files }
    }

    fn problem(files: &TlsFiles) -> String {
        server_config(files).map(|_| ()).unwrap_err().to_string()
    }

    #[test]
    fn good_files_are_taken() {
        assert_eq!(server_config(&folder().files).unwrap().alpn_protocols, [b"h2".to_vec()]);
    }

    #[test]
    fn bad_files_are_named_with_their_option() {
        let Folder { folder: _keep, files } = folder();
        let missing = problem(&TlsFiles { key: "/nonexistent/tls.key".into(), ..files.clone() });
        assert!(missing.contains("--tls-key /nonexistent/tls.key"), "{missing}");
        fs::write(&files.client_ca, "garbage").unwrap();
        let malformed = problem(&files);
        assert!(malformed.contains("--tls-client-ca") && malformed.contains("no certificate in it"), "{malformed}");
    }

    #[test]
    fn a_key_of_another_pair_is_refused() {
        let Folder { folder: _keep, files } = folder();
        fs::write(&files.key, KeyPair::generate().unwrap().serialize_pem()).unwrap();
        let mismatch = problem(&files);
        assert!(mismatch.contains("do not fit together"), "{mismatch}");
    }
}

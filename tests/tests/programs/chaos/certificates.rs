//! A certificate authority for the test. The test renews certificates and replaces the authority
//! while the programs run. Files change as in a mounted Kubernetes Secret: by replacing the
//! symbolic link `..data`.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, SanType};

/// The holder of a certificate.
#[derive(Debug, Clone)]
pub(crate) enum Holder {
    /// A replica on 127.0.0.1.
    Replica,
    /// The agent of a node.
    Node(String),
}

struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = parameters.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(parameters, key) }
    }

    /// Returns the certificate and the key in PEM.
    fn issue(&self, holder: &Holder) -> (String, String) {
        let mut parameters = CertificateParams::default();
        let (name, usage) = match holder {
            Holder::Replica => (SanType::IpAddress("127.0.0.1".parse().unwrap()), ExtendedKeyUsagePurpose::ServerAuth),
            Holder::Node(node) => {
                let uri = format!("headgate://node/{node}");
                (SanType::URI(uri.try_into().unwrap()), ExtendedKeyUsagePurpose::ClientAuth)
            }
        };
        parameters.subject_alt_names = vec![name];
        parameters.extended_key_usages = vec![usage];
        let key = KeyPair::generate().unwrap();
        (parameters.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

/// The stages of replacing the authority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// There is one authority.
    Settled,
    /// All holders also trust the next authority.
    BothTrusted,
    /// The next authority has issued the certificates of all holders.
    NextIssues,
}

/// All certificate folders and their holders.
pub(crate) struct Certificates {
    authorities: Vec<Authority>,
    phase: Phase,
    folders: Vec<(PathBuf, Holder)>,
    swaps: u64,
    replaced: u64,
}

impl Certificates {
    pub(crate) fn new() -> Self {
        Self {
            authorities: vec![Authority::new("authority 0")],
            phase: Phase::Settled,
            folders: Vec::new(),
            swaps: 0,
            replaced: 0,
        }
    }

    /// Creates a folder with tls.crt, tls.key and ca.crt. Later renewals replace these files.
    pub(crate) fn folder(&mut self, path: &Path, holder: Holder) {
        fs::create_dir_all(path).unwrap();
        self.folders.push((path.to_owned(), holder));
        self.swap(self.folders.len() - 1);
        for name in ["tls.crt", "tls.key", "ca.crt"] {
            symlink(format!("..data/{name}"), path.join(name)).unwrap();
        }
    }

    /// Issues a new certificate for every folder.
    pub(crate) fn renew(&mut self) {
        for index in 0..self.folders.len() {
            self.swap(index);
        }
    }

    /// Takes the next step of replacing the authority. First all holders trust both authorities,
    /// next the new authority issues all certificates, and last the old authority is removed.
    pub(crate) fn replace_authority(&mut self) {
        self.phase = match self.phase {
            Phase::Settled => {
                self.replaced += 1;
                self.authorities.push(Authority::new(&format!("authority {}", self.replaced)));
                Phase::BothTrusted
            }
            Phase::BothTrusted => Phase::NextIssues,
            Phase::NextIssues => {
                self.authorities.remove(0);
                Phase::Settled
            }
        };
        self.renew();
    }

    /// The number of times that the authority was replaced.
    pub(crate) fn replaced(&self) -> u64 {
        self.replaced
    }

    fn swap(&mut self, index: usize) {
        let (folder, holder) = &self.folders[index];
        let issuer = match self.phase {
            Phase::NextIssues => self.authorities.last(),
            Phase::Settled | Phase::BothTrusted => self.authorities.first(),
        };
        let (certificate, key) = issuer.unwrap().issue(holder);
        let trusted: String = self.authorities.iter().map(|authority| authority.pem.as_str()).collect();
        self.swaps += 1;
        let (name, link) = (format!("..{}", self.swaps), folder.join("..data"));
        fs::create_dir(folder.join(&name)).unwrap();
        for (file, text) in [("tls.crt", &certificate), ("tls.key", &key), ("ca.crt", &trusted)] {
            fs::write(folder.join(&name).join(file), text).unwrap();
        }
        let previous = fs::read_link(&link).ok();
        let draft = folder.join("..data_tmp");
        symlink(&name, &draft).unwrap();
        fs::rename(&draft, &link).unwrap();
        if let Some(previous) = previous {
            fs::remove_dir_all(folder.join(previous)).unwrap();
        }
    }
}

//! `headgatectl ca`: creates the authorities, and replaces one of them in three steps. Between the
//! steps, the operator passes the files on. No step makes a certificate in use untrusted, so
//! programs can connect at any time.
//!
//! `ca.crt` contains all trusted authorities. The first authority in the file signs new
//! certificates with `ca.key`. Between the steps `trust` and `sign`, `next.key` is the key of the
//! second authority. The names of the files of nodes begin with `node-`. Each step writes keys
//! before certificates, so that an interrupted step can be run again or names the remedy.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use rcgen::KeyPair;
use serde_json::json;
use x509_parser::{certificate::X509Certificate, extensions::ParsedExtension};

use super::{
    AuthorityFiles, CertsError, OF_NODES, OPERATORS, Written, bad_file,
    folder::{Folder, Kind},
    fresh_authority, kept_authority, new_authority,
};

const END: &str = "-----END CERTIFICATE-----";

/// The folders of certificates, which also contain copies of `ca.crt`.
const FOLDERS: [&str; 3] = ["control-plane", "nodes", "readers"];

/// What to do with the authorities.
#[derive(Debug, clap::Subcommand)]
pub enum CaAction {
    /// Create the authority of replicas and readers (ca.crt, ca.key) and the authority of nodes
    /// (node-ca.crt, node-ca.key)
    Init(CaFolder),
    /// Replace an authority in three steps, while the programs run
    Rotate {
        /// The step to run. Run the three steps in this order, and pass the files on after each
        /// step
        #[arg(value_enum)]
        step: Step,
        /// Replace the authority of nodes (node-ca.crt), in place of the one of replicas and
        /// readers
        #[arg(long)]
        nodes: bool,
        /// The folder.
        #[command(flatten)]
        folder: CaFolder,
    },
}

/// The folder of the authorities.
#[derive(Debug, clap::Args)]
pub struct CaFolder {
    /// Folder of the authorities, as for `headgatectl certs`
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
}

/// A step of a rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Step {
    /// Create a new authority, which is trusted but does not sign yet
    Trust,
    /// The new authority signs from now on, and the key of the old authority is deleted
    Sign,
    /// The old authority is no longer trusted. Fails while the folder contains a certificate of the
    /// old authority
    Retire,
}

/// Runs an action.
///
/// # Errors
///
/// [`CertsError`]. Run the action again after the cause that the error names is corrected.
pub fn run(action: &CaAction) -> Result<Written, CertsError> {
    let now = SystemTime::now();
    match action {
        CaAction::Init(folder) => init(&folder.out, now),
        CaAction::Rotate { step, nodes, folder } => {
            let files = if *nodes { OF_NODES } else { OPERATORS };
            let rotation = Rotation { files, folder: Folder::open(&folder.out, true)?, now };
            match step {
                Step::Trust => rotation.trust(),
                Step::Sign => rotation.sign(),
                Step::Retire => rotation.retire(),
            }
        }
    }
}

fn init(out: &Path, now: SystemTime) -> Result<Written, CertsError> {
    let mut folder = Folder::open(out, false)?;
    for files in [OPERATORS, OF_NODES] {
        for name in [files.file("ca.crt"), files.file("ca.key")] {
            if folder.read(&name)?.is_some() {
                let problem =
                    "exists already: replace the authority with `headgatectl ca rotate`, or pass another --out";
                return Err(bad_file(&folder.path(&name), problem));
            }
        }
        new_authority(files, &mut folder, now)?;
    }
    written(folder, "Create certificates with `headgatectl certs`.")
}

/// A rotation of one authority, with its files in the folder.
struct Rotation {
    files: AuthorityFiles,
    folder: Folder,
    now: SystemTime,
}

impl Rotation {
    fn trust(mut self) -> Result<Written, CertsError> {
        let authorities = self.authorities()?;
        if self.read("next.key")?.is_some() {
            return self.fault("next.key", "exists already: continue with step sign");
        }
        if authorities.len() > 1 {
            return self.fault("ca.crt", "contains several authorities: finish the last rotation with step retire");
        }
        self.check_signer(&authorities)?;
        let new = fresh_authority(self.files, self.now)?;
        self.folder.add(&self.files.file("next.key"), Kind::Key, &new.issuer.key().serialize_pem())?;
        self.add_bundle(&[authorities, vec![new.certificate_pem]].concat())?;
        written(
            self.folder,
            "Pass the certificates on to the control plane (ca.crt also to all nodes and all readers). Run step sign when all of them have the file.",
        )
    }

    fn sign(mut self) -> Result<Written, CertsError> {
        let mut authorities = self.authorities()?;
        let Some(key) = self.read("next.key")? else {
            return self.fault("next.key", "missing: first run step trust");
        };
        let path = self.path("next.key");
        let pair =
            KeyPair::from_pem(&key).map_err(|error| bad_file(&path, format!("is not a PEM private key ({error})")))?;
        let own = rcgen::PublicKeyData::der_bytes(&pair);
        let mut is_signer = Vec::new();
        for pem in &authorities {
            is_signer.push(parsed(&self.path("ca.crt"), pem, |certificate| {
                certificate.public_key().subject_public_key.data.as_ref() == own
            })?);
        }
        let Some(place) = is_signer.into_iter().position(|is_signer| is_signer) else {
            let problem = "is not the key of a trusted authority: delete this file and run step trust again";
            return self.fault("next.key", problem);
        };
        authorities[..=place].rotate_right(1);
        kept_authority(self.files, &self.folder, authorities[0].clone(), &key, self.now)?;
        self.folder.add(&self.files.file("ca.key"), Kind::Key, &key)?;
        self.add_bundle(&authorities)?;
        let written = written(
            self.folder,
            "Renew all certificates with `headgatectl certs --force`, and pass them on. Run step retire when every program uses its new certificate.",
        )?;
        fs::remove_file(&path).map_err(|error| bad_file(&path, format!("cannot be deleted: {error}")))?;
        Ok(written)
    }

    fn retire(mut self) -> Result<Written, CertsError> {
        let authorities = self.authorities()?;
        if self.read("next.key")?.is_some() {
            return self.fault("next.key", "exists, so the old authority still signs: first run step sign");
        }
        if authorities.len() == 1 {
            return self.fault("ca.crt", "contains only one authority: no authority can be removed");
        }
        self.check_signer(&authorities)?;
        let signer = parsed(&self.path("ca.crt"), &authorities[0], own_key_id)?;
        for path in self.certificates()? {
            let pem = fs::read_to_string(&path).map_err(|error| bad_file(&path, format!("cannot be read: {error}")))?;
            if parsed(&path, &pem, signing_key_id)? != signer {
                let problem = "is not a certificate of the new authority: renew it with `headgatectl certs --force`, or delete it";
                return Err(bad_file(&path, problem));
            }
        }
        self.add_bundle(&authorities[..1])?;
        written(
            self.folder,
            "Pass the certificates on. Connections with a certificate of the old authority are declined from then on.",
        )
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path(&self.files.file(name))
    }

    fn read(&self, name: &str) -> Result<Option<String>, CertsError> {
        self.folder.read(&self.files.file(name))
    }

    fn fault<T>(&self, name: &str, problem: &str) -> Result<T, CertsError> {
        Err(bad_file(&self.path(name), problem))
    }

    /// Returns the trusted authorities, each as PEM. There is at least one.
    fn authorities(&self) -> Result<Vec<String>, CertsError> {
        let text = self.read("ca.crt")?;
        let parts = text.as_deref().unwrap_or_default().split_inclusive(END).map(str::trim);
        let authorities: Vec<_> = parts.filter(|part| !part.is_empty()).map(|part| format!("{part}\n")).collect();
        if authorities.is_empty() {
            return self.fault("ca.crt", "contains no authority: create an authority with `headgatectl ca init`");
        }
        Ok(authorities)
    }

    /// Fails if the first authority cannot sign with its key.
    fn check_signer(&self, authorities: &[String]) -> Result<(), CertsError> {
        let Some(key) = self.read("ca.key")? else {
            return self.fault("ca.key", "missing, but its certificate exists: restore the authority's key");
        };
        kept_authority(self.files, &self.folder, authorities[0].clone(), &key, self.now).map(drop)
    }

    /// Adds the trusted certificates and their existing copies.
    fn add_bundle(&mut self, authorities: &[String]) -> Result<(), CertsError> {
        let (bundle, name) = (authorities.concat(), self.files.file("ca.crt"));
        self.folder.add(&name, Kind::Authority, &bundle)?;
        for copy in FOLDERS.map(|folder| format!("{folder}/{name}")) {
            if self.folder.read(&copy)?.is_some() {
                self.folder.add(&copy, Kind::Authority, &bundle)?;
            }
        }
        Ok(())
    }

    /// Returns the paths of all certificates that the authority signs, in order.
    fn certificates(&self) -> Result<Vec<PathBuf>, CertsError> {
        let mut found = Vec::new();
        for path in self.files.signs.iter().map(|name| self.folder.path(name)) {
            let unreadable = |error: io::Error| bad_file(&path, format!("cannot be listed: {error}"));
            let entries = match fs::read_dir(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                entries => entries.map_err(unreadable)?,
            };
            for entry in entries {
                let file = entry.map_err(unreadable)?.path();
                if file.extension().is_some_and(|extension| extension == "crt") && !file.ends_with("ca.crt") {
                    found.push(file);
                }
            }
        }
        found.sort();
        Ok(found)
    }
}

/// Writes the files, and describes them and the next step.
fn written(folder: Folder, next: &str) -> Result<Written, CertsError> {
    let files = folder.write()?;
    let list: String = files.iter().map(|file| format!("  {file}\n")).collect();
    Ok(Written { text: format!("Written:\n{list}{next}\n"), json: json!({ "files": files, "next": next }) })
}

/// Parses a certificate of the file `path`, and returns what `read` finds in it.
fn parsed<T>(path: &Path, pem: &str, read: impl FnOnce(&X509Certificate<'_>) -> T) -> Result<T, CertsError> {
    let bad = |error: &dyn std::fmt::Display| bad_file(path, format!("contains a faulty certificate ({error})"));
    let (_, pem) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|error| bad(&error))?;
    pem.parse_x509().map(|certificate| read(&certificate)).map_err(|error| bad(&error))
}

/// The identifier of the certificate's own key (RFC 5280, section 4.2.1.2).
fn own_key_id(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::SubjectKeyIdentifier(id) => Some(id.0.to_vec()),
        _ => None,
    })
}

/// The identifier of the key that signed the certificate (RFC 5280, section 4.2.1.1).
fn signing_key_id(certificate: &X509Certificate<'_>) -> Option<Vec<u8>> {
    certificate.iter_extensions().find_map(|extension| match extension.parsed_extension() {
        ParsedExtension::AuthorityKeyIdentifier(id) => id.key_identifier.as_ref().map(|id| id.0.to_vec()),
        _ => None,
    })
}

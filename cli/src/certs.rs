//! `headgatectl certs`: creates authorities and certificates for a trial, in the layout that the
//! manifests under `deploy/` expect. One authority signs for replicas and readers, and one for
//! nodes: with enrolment, each replica has the key of the latter. [`rotation`] replaces the
//! authorities.

mod folder;
pub mod rotation;

use std::{
    net::IpAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use headgate_tls::Validity;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose,
    SanType,
};
use serde_json::json;

use folder::{Folder, Kind};

/// The validity of an authority in days.
const AUTHORITY_DAYS: u32 = 3650;

/// The tolerated difference between the clocks of two machines.
const CLOCK_TOLERANCE: Duration = Duration::from_secs(3600);

const DAY: Duration = Duration::from_secs(86_400);

/// An authority, by its files in the folder.
#[derive(Debug, Clone, Copy)]
struct AuthorityFiles {
    /// The begin of the names of its files.
    prefix: &'static str,
    /// The folders of the certificates that it signs.
    signs: &'static [&'static str],
}

/// The authority that signs for replicas and readers.
const OPERATORS: AuthorityFiles = AuthorityFiles { prefix: "", signs: &["control-plane", "readers"] };

/// The authority that signs for nodes.
const OF_NODES: AuthorityFiles = AuthorityFiles { prefix: "node-", signs: &["nodes"] };

impl AuthorityFiles {
    /// The name of one of its files: `ca.crt`, all trusted certificates, of which the first one
    /// signs; `ca.key`, its key; or `next.key`, during a rotation the key of the next authority.
    fn file(self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }
}

/// The certificates to create.
#[derive(Debug, clap::Args)]
pub struct CertsArgs {
    /// Folder for the files. Existing authorities (ca.crt and ca.key for replicas and readers,
    /// node-ca.crt and node-ca.key for nodes) are reused, so that nodes can be added later
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// Node that gets a certificate. Repeat the option for several nodes, or separate names by
    /// commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub node: Vec<String>,
    /// DNS name by which agents reach the control plane. Repeat the option for several names, or
    /// separate names by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub server_name: Vec<String>,
    /// IP address by which agents reach the control plane. Repeat the option for several addresses,
    /// or separate addresses by commas
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    pub server_ip: Vec<IpAddr>,
    /// Name of a user with read access through headgatectl and grpcurl. Repeat the option for
    /// several users, or separate names by commas
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub reader: Vec<String>,
    /// Validity of the certificates in days
    #[arg(long, value_name = "DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
    /// Replace existing certificates and keys to renew them. The authorities are never replaced
    #[arg(long)]
    pub force: bool,
}

/// Why the command failed.
#[derive(Debug, thiserror::Error)]
pub enum CertsError {
    /// The command line requests no certificate, or a certificate that cannot be created.
    #[error("{0}")]
    Usage(String),
    /// A file or the folder cannot be used.
    #[error("{}: {problem}", .path.display())]
    File {
        /// The path of the file or folder.
        path: PathBuf,
        /// The fault and the remedy.
        problem: String,
    },
    /// The cryptographic library reports an error.
    #[error("cannot create a certificate: {0}")]
    Crypto(#[from] rcgen::Error),
}

fn bad_file(path: &Path, problem: impl std::fmt::Display) -> CertsError {
    CertsError::File { path: path.to_owned(), problem: problem.to_string() }
}

/// What a command has written: as text for people, and as JSON for programs.
#[derive(Debug)]
pub struct Written {
    /// The text, which ends with a line feed.
    pub text: String,
    /// The JSON.
    pub json: serde_json::Value,
}

/// A certificate authority that can sign certificates.
struct Authority {
    certificate_pem: String,
    issuer: Issuer<'static, KeyPair>,
    not_after: SystemTime,
    /// True if the authority already existed.
    is_kept: bool,
}

/// Creates the requested certificates. If one certificate cannot be created, the function writes no
/// file.
pub fn make(args: &CertsArgs) -> Result<Written, CertsError> {
    check(args)?;
    let now = SystemTime::now();
    let mut folder = Folder::open(&args.out, args.force)?;
    let authority = find_authority(OPERATORS, &mut folder, now)?;
    // The authority of nodes may be elsewhere, if the folder only makes certificates of readers.
    let needs_nodes = !args.node.is_empty() || !args.server_name.is_empty() || !args.server_ip.is_empty();
    let of_nodes = needs_nodes.then(|| find_authority(OF_NODES, &mut folder, now)).transpose()?;
    let not_after = now + DAY * args.days;
    let end = of_nodes.as_ref().map_or(authority.not_after, |of_nodes| of_nodes.not_after.min(authority.not_after));
    if not_after > end {
        let problem = format!(
            "an authority in it expires in {} days, but the certificates must be valid for {} days: pass fewer --days, or another --out for a new authority",
            end.duration_since(now).unwrap_or_default().as_secs() / DAY.as_secs(),
            args.days
        );
        return Err(bad_file(&args.out, problem));
    }
    let ca = &authority.certificate_pem;
    let valid = (now - CLOCK_TOLERANCE, not_after);
    let mut names = server_names(args)?;
    if !names.is_empty() {
        // Replicas are clients of each other: see --peers of the control plane.
        names.push(SanType::URI("headgate://replica/headgate-control-plane".try_into()?));
        let usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        leaf(&mut folder, &authority, "control-plane/tls", "headgate-control-plane", names, usages, valid)?;
        folder.add("control-plane/ca.crt", Kind::Authority, ca)?;
    }
    let readers = ("reader", "readers", &args.reader, &authority);
    let nodes = of_nodes.as_ref().map(|of_nodes| ("node", "nodes", &args.node, of_nodes));
    for (role, below, names, authority) in nodes.into_iter().chain([readers]) {
        for name in names {
            let uri = SanType::URI(format!("headgate://{role}/{name}").try_into()?);
            let usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
            leaf(&mut folder, authority, &format!("{below}/{name}"), name, vec![uri], usages, valid)?;
        }
    }
    if !args.node.is_empty() {
        folder.add("nodes/ca.crt", Kind::Authority, ca)?;
    }
    let files = folder.write()?;
    let unix_ms = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs() * 1000;
    let json = json!({
        "out": args.out.display().to_string(),
        "files": files,
        "not_after_unix_ms": unix_ms(not_after),
        "authority_is_new": !authority.is_kept,
        "authority_not_after_unix_ms": unix_ms(authority.not_after),
    });
    Ok(Written { text: text(args, &files, &authority, not_after), json })
}

fn check(args: &CertsArgs) -> Result<(), CertsError> {
    let usage = |text: String| Err(CertsError::Usage(text));
    if args.node.is_empty() && args.reader.is_empty() && args.server_name.is_empty() && args.server_ip.is_empty() {
        return usage("nothing to create: pass --server-name or --server-ip, --node, or --reader".to_owned());
    }
    for (option, names) in [("--node", &args.node), ("--reader", &args.reader), ("--server-name", &args.server_name)] {
        for (i, name) in names.iter().enumerate() {
            headgate_proto::check_subdomain(name)
                .map_err(|problem| CertsError::Usage(format!("{option}: {problem}")))?;
            // In the folder of the nodes' files, `ca.crt` is the authority's certificate.
            if name == "ca" && option == "--node" {
                return usage(
                    "--node ca: the certificate ca.crt of this node would replace the certificate of the authority; create it in another folder".to_owned(),
                );
            }
            if names[..i].contains(name) {
                return usage(format!("{option} {name} is given twice"));
            }
        }
    }
    Ok(())
}

fn server_names(args: &CertsArgs) -> Result<Vec<SanType>, CertsError> {
    let names = args.server_name.iter().map(|name| Ok(SanType::DnsName(name.as_str().try_into()?)));
    let addresses = args.server_ip.iter().map(|address| Ok(SanType::IpAddress(*address)));
    names.chain(addresses).collect()
}

/// Reads an authority of the folder, or creates a new authority.
fn find_authority(files: AuthorityFiles, folder: &mut Folder, now: SystemTime) -> Result<Authority, CertsError> {
    let (certificates, key) = (files.file("ca.crt"), files.file("ca.key"));
    match (folder.read(&certificates)?, folder.read(&key)?) {
        (Some(certificate), Some(key)) => kept_authority(files, folder, certificate, &key, now),
        (None, None) => new_authority(files, folder, now),
        (certificate, _) => {
            let (missing, found, part) =
                if certificate.is_some() { (key, certificates, "key") } else { (certificates, key, "certificate") };
            let problem = format!(
                "missing, but {found} exists: restore the authority's {part}, or pass another --out for a new authority"
            );
            Err(bad_file(&folder.path(&missing), problem))
        }
    }
}

fn kept_authority(
    files: AuthorityFiles,
    folder: &Folder,
    pem: String,
    key: &str,
    now: SystemTime,
) -> Result<Authority, CertsError> {
    let (ca_crt, ca_key) = (folder.path(&files.file("ca.crt")), folder.path(&files.file("ca.key")));
    let no_certificate =
        |error: &dyn std::fmt::Display| bad_file(&ca_crt, format!("is not a PEM certificate ({error})"));
    let key =
        KeyPair::from_pem(key).map_err(|error| bad_file(&ca_key, format!("is not a PEM private key ({error})")))?;
    let (_, parsed) = x509_parser::pem::parse_x509_pem(pem.as_bytes()).map_err(|error| no_certificate(&error))?;
    let parsed = parsed.parse_x509().map_err(|error| no_certificate(&error))?;
    if rcgen::PublicKeyData::der_bytes(&key) != parsed.public_key().subject_public_key.data.as_ref() {
        let problem = format!("is not the key of {}; restore the right key, or pass another --out", ca_crt.display());
        return Err(bad_file(&ca_key, problem));
    }
    let not_after = Validity::of(&parsed).not_after;
    if not_after <= now {
        return Err(bad_file(&ca_crt, "this authority has expired: pass another --out for a new authority"));
    }
    let is_ca = parsed.basic_constraints().ok().flatten().is_some_and(|constraints| constraints.value.ca);
    if !is_ca {
        return Err(bad_file(&ca_crt, "is not an authority's certificate: pass another --out for a new authority"));
    }
    let issuer = Issuer::from_ca_cert_pem(&pem, key)?;
    Ok(Authority { certificate_pem: pem, issuer, not_after, is_kept: true })
}

fn new_authority(files: AuthorityFiles, folder: &mut Folder, now: SystemTime) -> Result<Authority, CertsError> {
    let authority = fresh_authority(files, now)?;
    folder.add(&files.file("ca.key"), Kind::Key, &authority.issuer.key().serialize_pem())?;
    folder.add(&files.file("ca.crt"), Kind::Authority, &authority.certificate_pem)?;
    Ok(authority)
}

/// Creates an authority. Writes no file.
fn fresh_authority(files: AuthorityFiles, now: SystemTime) -> Result<Authority, CertsError> {
    let not_after = now + DAY * AUTHORITY_DAYS;
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, format!("headgate trial {}authority", files.prefix));
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (params.not_before, params.not_after) = ((now - CLOCK_TOLERANCE).into(), not_after.into());
    let key = KeyPair::generate()?;
    let certificate_pem = params.self_signed(&key)?.pem();
    Ok(Authority { certificate_pem, issuer: Issuer::new(params, key), not_after, is_kept: false })
}

/// Adds a certificate `FILE.crt` and its key `FILE.key`.
fn leaf(
    folder: &mut Folder,
    authority: &Authority,
    file: &str,
    common_name: &str,
    names: Vec<SanType>,
    usages: Vec<ExtendedKeyUsagePurpose>,
    (not_before, not_after): (SystemTime, SystemTime),
) -> Result<(), CertsError> {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, common_name_of(common_name));
    params.subject_alt_names = names;
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = usages;
    params.use_authority_key_identifier_extension = true;
    (params.not_before, params.not_after) = (not_before.into(), not_after.into());
    let key = KeyPair::generate()?;
    let certificate = params.signed_by(&key, &authority.issuer)?;
    folder.add(&format!("{file}.key"), Kind::Key, &key.serialize_pem())?;
    folder.add(&format!("{file}.crt"), Kind::Certificate, &certificate.pem())
}

/// Returns the start of `name` as a common name, which has at most 64 characters (RFC 5280,
/// ub-common-name). The subject alternative names contain the complete identity.
fn common_name_of(name: &str) -> &str {
    &name[..name.floor_char_boundary(64)]
}

/// Describes the created files and their use.
fn text(args: &CertsArgs, files: &[String], authority: &Authority, not_after: SystemTime) -> String {
    let out = quoted(&args.out.display().to_string());
    let days = |until: SystemTime| {
        until.duration_since(SystemTime::now()).unwrap_or_default().as_secs().div_ceil(DAY.as_secs())
    };
    let by_address = args.server_ip.first().map(|ip| match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    });
    let server = args.server_name.first().cloned().or(by_address);
    let mut lines = vec![format!("Created, valid for {} days:", days(not_after))];
    lines.extend(files.iter().map(|file| format!("  {file}")));
    let origin = if authority.is_kept { "The existing authority is reused" } else { "The authority is new" };
    lines.push(format!(
        "{origin}, valid for {} days. Its key {out}/ca.key signs for replicas and readers, and {out}/node-ca.key for nodes: keep both secret.",
        days(authority.not_after)
    ));
    let host = server.as_deref().unwrap_or("HOST");
    let mut section = |title: &str, commands: Vec<String>| {
        lines.extend((!commands.is_empty()).then(|| format!("\n{title}")));
        lines.extend(commands.into_iter().map(|command| format!("  {command}")));
    };
    let control_plane = server.iter().map(|_| {
        format!(
            "headgate-control-plane --source kubernetes --tls-cert {out}/control-plane/tls.crt --tls-key {out}/control-plane/tls.key \
             --tls-client-ca {out}/control-plane/ca.crt --tls-node-ca {out}/node-ca.crt"
        )
    });
    section("Control plane:", control_plane.collect());
    let agents = args.node.iter().map(|node| {
        format!(
            "headgate-node-agent --node-name {node} --control-plane https://{host}:7443 --tls-cert {out}/nodes/{node}.crt --tls-key \
             {out}/nodes/{node}.key --tls-ca {out}/nodes/ca.crt"
        )
    });
    section("Agents, each on its node:", agents.collect());
    let readers = args.reader.iter().map(|reader| {
        format!(
            "headgatectl --server https://{host}:7444 --tls-cert {out}/readers/{reader}.crt --tls-key {out}/readers/{reader}.key --tls-ca \
             {out}/ca.crt status"
        )
    });
    section("For readers:", readers.collect());
    let objects = server.iter().flat_map(|_| {
        [
            format!("secret generic headgate-control-plane-tls --from-file={out}/control-plane"),
            format!("secret tls headgate-node-authority --cert={out}/node-ca.crt --key={out}/node-ca.key"),
            format!("configmap headgate-authority --from-file={out}/ca.crt"),
        ]
    });
    let objects = objects.map(|object| {
        format!(
            "kubectl -n headgate-system create {object} --dry-run=client -o yaml | kubectl apply --server-side -f -"
        )
    });
    section("In a cluster, where agents enrol (repeat after each change; no restart is needed):", objects.collect());
    lines.join("\n") + "\n"
}

/// Quotes a word for the shell.
fn quoted(word: &str) -> String {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+,:@".contains(&byte);
    if !word.is_empty() && word.bytes().all(is_plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_with_special_characters_are_quoted_for_the_shell() {
        assert_eq!(quoted("/tmp/certs-1"), "/tmp/certs-1");
        assert_eq!(quoted("/tmp/my certs"), "'/tmp/my certs'");
        assert_eq!(quoted("it's"), r"'it'\''s'");
    }

    #[test]
    fn long_common_names_are_cut() {
        assert_eq!(common_name_of(&"a".repeat(70)), "a".repeat(64));
        assert_eq!(common_name_of("node-a"), "node-a");
    }
}

#![allow(clippy::unwrap_used)]
use std::{
    fs,
    time::{Duration, UNIX_EPOCH},
};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair, SanType,
    date_time_ymd,
};

use super::*;
use crate::files::Side;

struct Folder {
    folder: tempfile::TempDir,
    authority: CertifiedIssuer<'static, KeyPair>,
}

fn authority() -> CertifiedIssuer<'static, KeyPair> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
}

impl Folder {
    fn new() -> Self {
        let new = Self { folder: tempfile::tempdir().unwrap(), authority: authority() };
        new.write("ca", &new.authority.pem());
        new.own(|_| {});
        new
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.folder.path().join(name), text).unwrap();
    }

    fn own(&self, change: impl FnOnce(&mut CertificateParams)) {
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.subject_alt_names.push(SanType::URI("headgate://replica/test".try_into().unwrap()));
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        self.write("cert", &params.signed_by(&key, &self.authority).unwrap().pem());
        self.write("key", &key.serialize_pem());
    }

    fn reloader(&self, side: Side) -> Reloader<usize> {
        let path = |name| self.folder.path().join(name);
        let given = |name| Some(path(name)).filter(|file| file.exists());
        let (node_ca, denied) = (given("node_ca").unwrap_or_else(|| path("ca")), given("denied"));
        let files = Files { side, cert: path("cert"), key: path("key"), ca: path("ca"), node_ca, denied };
        Reloader::new(files, |material| Ok(material.authorities.len()))
    }

    fn problem(&self, side: Side) -> String {
        self.reloader(side).load(SystemTime::now()).map(drop).unwrap_err().to_string()
    }
}

#[test]
fn contents_that_come_back_keep_a_configuration_that_is_in_use() {
    let folder = Folder::new();
    let mut reloader = folder.reloader(Side::Server);
    let now = SystemTime::now();
    let in_use = reloader.load(now).unwrap();
    let earlier = ["cert", "key"].map(|name| fs::read_to_string(folder.folder.path().join(name)).unwrap());
    for _ in 0..3 {
        folder.own(|_| {});
        assert!(!Arc::ptr_eq(&in_use, &reloader.load(now).unwrap()));
    }
    assert_eq!(reloader.known.len(), 2, "the one in use and the latest");
    folder.write("cert", &earlier[0]);
    folder.write("key", &earlier[1]);
    assert!(Arc::ptr_eq(&in_use, &reloader.load(now).unwrap()));
}

#[test]
fn an_expired_certificate_is_refused_even_if_the_files_have_not_changed() {
    let folder = Folder::new();
    folder.own(|params| params.not_after = date_time_ymd(2060, 1, 1));
    let mut reloader = folder.reloader(Side::Server);
    let loaded = reloader.load(SystemTime::now()).unwrap();
    assert_eq!(loaded.validity.not_after_unix_seconds(), 2_840_140_800);
    let later = UNIX_EPOCH + Duration::from_secs(2_840_140_801);
    let error = reloader.load(later).map(drop).unwrap_err().to_string();
    let expected = "cert: the certificate expired at 2060-01-01T00:00:00Z; renew it, or check this machine's clock";
    assert!(error.contains(expected), "{error}");
}

#[test]
fn every_error_names_the_option_the_file_and_the_remedy() {
    let folder = Folder::new();
    let file = |name| folder.folder.path().join(name).display().to_string();
    let holds = |side, parts: &[&str]| {
        let error = folder.problem(side);
        assert!(parts.iter().all(|part| error.contains(part)), "{error} lacks one of {parts:?}");
    };
    holds(Side::Client, &["--tls-cert", &file("cert"), "lacks clientAuth; issue a new certificate"]);
    folder.own(|params| params.subject_alt_names.clear());
    holds(
        Side::Server,
        &["--tls-cert", &file("cert"), "names no address", "issue a new certificate with the DNS names"],
    );
    folder.own(|params| params.subject_alt_names.truncate(1));
    holds(Side::Server, &["--tls-cert", &file("cert"), "names no replica", "the URI headgate://replica/NAME"]);
    folder.own(|params| params.not_before = date_time_ymd(2200, 1, 1));
    holds(Side::Server, &["--tls-cert", "not valid before 2200-01-01T00:00:00Z; check this machine's clock"]);
    folder.own(|params| params.not_after = date_time_ymd(2001, 1, 1));
    holds(Side::Server, &["--tls-cert", "expired at 2001-01-01T00:00:00Z; renew it, or check this machine's clock"]);
    folder.own(|_| {});
    folder.write("key", &KeyPair::generate().unwrap().serialize_pem());
    holds(Side::Server, &["--tls-key", &file("key"), "is not the key of --tls-cert", &file("cert")]);
    folder.write("key", "garbage");
    holds(Side::Server, &["--tls-key", &file("key"), "must be a PEM file with a private key"]);
    fs::remove_file(file("key")).unwrap();
    holds(Side::Server, &["--tls-key", &file("key"), "cannot read the file: No such file"]);
    folder.own(|_| {});
    folder.write("cert", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n");
    holds(Side::Server, &["--tls-cert", &file("cert"), "malformed"]);
    folder.own(|_| {});
    folder.write("ca", "");
    holds(
        Side::Server,
        &["--tls-client-ca", &file("ca"), "the file contains no certificate", "sign clients' certificates"],
    );
    holds(
        Side::Client,
        &["--tls-ca", &file("ca"), "the file contains no certificate", "sign control planes' certificates"],
    );
    fs::write(file("ca"), vec![b'a'; (4 << 20) + 1]).unwrap();
    holds(Side::Server, &["--tls-client-ca", &file("ca"), "larger than 4194304 bytes"]);
    folder.write("ca", &folder.authority.pem());
    folder.write("node_ca", "");
    holds(Side::Server, &["--tls-node-ca", &file("node_ca"), "the file contains no certificate"]);
    folder.write("node_ca", &folder.authority.pem());
    folder.write("denied", "n1");
    holds(Side::Server, &["--tls-denied", &file("denied"), "line 1 is none of them", "write headgate://ROLE/NAME"]);
}

#[test]
fn expired_authorities_are_left_out_and_other_authorities_are_used() {
    let folder = Folder::new();
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.not_after = date_time_ymd(2010, 1, 1);
    let expired = params.self_signed(&KeyPair::generate().unwrap()).unwrap().pem();
    folder.write("ca", &[expired.clone(), folder.authority.pem(), authority().pem()].concat());
    assert_eq!(*folder.reloader(Side::Server).load(SystemTime::now()).unwrap().config, 2);
    folder.write("ca", &expired);
    let error = folder.problem(Side::Server);
    let expected = "every authority in the file has expired, the last at 2010-01-01T00:00:00Z; replace them, or";
    assert!(error.contains(expected), "{error}");
}

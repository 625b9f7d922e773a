//! A certificate authority, its certificates, and a TLS client.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    sync::Arc,
};

use headgate_control_plane::serve::tls::ServerTls;
use hyper_util::rt::TokioIo;
use rcgen::{BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, SanType};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName},
};
use tokio::net::TcpSocket;
use tokio_rustls::TlsConnector;
use tonic::transport::{Channel, Error};

use crate::client::endpoint;

pub(crate) struct Authority {
    certificate: Certificate,
    issuer: Issuer<'static, KeyPair>,
}

pub(crate) struct Leaf {
    certificate: Certificate,
    key: KeyPair,
}

impl Authority {
    pub(crate) fn new() -> Self {
        let mut parameters = CertificateParams::default();
        parameters.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        parameters.distinguished_name.push(DnType::CommonName, "test authority");
        let key = KeyPair::generate().unwrap();
        let certificate = parameters.self_signed(&key).unwrap();
        Self { certificate, issuer: Issuer::new(parameters, key) }
    }

    fn leaf(&self, common_name: &str, organization: Option<&str>, names: Vec<SanType>) -> Leaf {
        let mut parameters = CertificateParams::default();
        parameters.distinguished_name.push(DnType::CommonName, common_name);
        if let Some(organization) = organization {
            parameters.distinguished_name.push(DnType::OrganizationName, organization);
        }
        parameters.subject_alt_names = names;
        let key = KeyPair::generate().unwrap();
        Leaf { certificate: parameters.signed_by(&key, &self.issuer).unwrap(), key }
    }

    pub(crate) fn client(&self, common_name: &str, uri: Option<&str>) -> Leaf {
        self.leaf(common_name, None, uri.map(|uri| SanType::URI(uri.try_into().unwrap())).into_iter().collect())
    }

    /// A client certificate with the same names as a kubelet's certificate.
    pub(crate) fn kubelet(&self, node: &str) -> Leaf {
        self.leaf(&format!("system:node:{node}"), Some("system:nodes"), Vec::new())
    }

    /// Writes the server's files and loads them as the control plane does.
    pub(crate) fn server_tls(&self, folder: &Path) -> Arc<ServerTls> {
        let leaf = self.leaf("control plane", None, vec![SanType::DnsName("localhost".try_into().unwrap())]);
        let [cert, key, client_ca] = ["tls.crt", "tls.key", "ca.crt"].map(|name| folder.join(name));
        fs::write(&cert, leaf.certificate.pem()).unwrap();
        fs::write(&key, leaf.key.serialize_pem()).unwrap();
        fs::write(&client_ca, self.certificate.pem()).unwrap();
        ServerTls::load(cert, key, client_ca).unwrap()
    }
}

/// Connects with a certificate, or without one. The client trusts the authority.
pub(crate) async fn connect(
    address: SocketAddr,
    authority: &Authority,
    leaf: Option<&Leaf>,
) -> Result<Channel, Arc<Error>> {
    connect_from(Ipv4Addr::LOCALHOST.into(), address, authority, leaf).await
}

/// Connects like [`connect`], from the address `host`.
pub(crate) async fn connect_from(
    host: IpAddr,
    address: SocketAddr,
    authority: &Authority,
    leaf: Option<&Leaf>,
) -> Result<Channel, Arc<Error>> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.certificate.der().clone()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let mut config = match leaf {
        None => builder.with_no_client_auth(),
        Some(leaf) => {
            let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(leaf.key.serialize_der()));
            builder.with_client_auth_cert(vec![leaf.certificate.der().clone()], key).unwrap()
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(config));
    let connect = tower::service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let socket = TcpSocket::new_v4()?;
            socket.bind((host, 0).into())?;
            let stream = socket.connect(address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            Ok::<_, std::io::Error>(TokioIo::new(connector.connect(name, stream).await?))
        }
    });
    endpoint(address).connect_with_connector(connect).await.map_err(Arc::new)
}

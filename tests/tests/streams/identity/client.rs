//! A TLS client with any certificate, valid or not.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::Arc,
};

use headgate_proto::v1::{self, discovery_client::DiscoveryClient, inspect_client::InspectClient};
use headgate_tls::{Files, Side};
use hyper_util::rt::TokioIo;
use rustls::{
    ClientConfig, ConfigBuilder, HandshakeKind, RootCertStore,
    client::WantsClientCert,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _},
};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpSocket, TcpStream},
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    Status, Streaming,
    transport::{Channel, Endpoint},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};
use tonic_reflection::pb::v1::{
    ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
    server_reflection_request::MessageRequest,
};

use super::{
    authority::{Authority, Pair},
    server::GUARD,
};

/// A client configuration: its certificate, the authority that it trusts, and its session cache.
#[derive(Clone)]
pub(crate) struct Client(Arc<ClientConfig>);

/// A connection, and the kind of its handshake.
pub(crate) struct Connected {
    pub(crate) channel: Channel,
    pub(crate) kind: HandshakeKind,
    pub(crate) server_certificate: CertificateDer<'static>,
}

/// Paths of client files, for error messages.
pub(crate) fn files() -> Files {
    let [cert, key, ca] = ["/client/tls.crt", "/client/tls.key", "/client/ca.crt"].map(Into::into);
    Files { side: Side::Client, cert, key, node_ca: ca.clone(), ca, denied: None }
}

fn trusting(authority: &Authority) -> ConfigBuilder<ClientConfig, WantsClientCert> {
    let mut roots = RootCertStore::empty();
    roots.add(authority.der()).unwrap();
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    builder.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots)
}

impl Client {
    pub(crate) fn new(authority: &Authority, own: &Pair) -> Self {
        let key = PrivateKeyDer::from_pem_slice(own.key.as_bytes()).unwrap();
        let mut config = trusting(authority).with_client_auth_cert(vec![own.der.clone()], key).unwrap();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(Arc::new(config))
    }

    /// A client without a certificate.
    pub(crate) fn anonymous(authority: &Authority) -> Self {
        let mut config = trusting(authority).with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        Self(Arc::new(config))
    }

    async fn handshake(&self, host: IpAddr, address: SocketAddr) -> io::Result<TlsStream<TcpStream>> {
        let socket = TcpSocket::new_v4()?;
        socket.bind((host, 0).into())?;
        let stream = socket.connect(address).await?;
        let name = ServerName::try_from(address.ip().to_string()).unwrap();
        TlsConnector::from(Arc::clone(&self.0)).connect(name, stream).await
    }

    pub(crate) async fn connect(&self, address: SocketAddr) -> Result<Connected, io::Error> {
        self.connect_from(Ipv4Addr::LOCALHOST.into(), address).await
    }

    /// Connects like [`Self::connect`], from the address `host`.
    pub(crate) async fn connect_from(&self, host: IpAddr, address: SocketAddr) -> Result<Connected, io::Error> {
        let stream = self.handshake(host, address).await?;
        let session = stream.get_ref().1;
        let kind = session.handshake_kind().unwrap();
        let server_certificate = session.peer_certificates().unwrap()[0].clone().into_owned();
        let mut stream = Some(TokioIo::new(stream));
        let connect = tower::service_fn(move |_| std::future::ready(stream.take().ok_or("one connection only")));
        let endpoint = Endpoint::from_static("http://control-plane");
        let channel = endpoint.connect_with_connector(connect).await.map_err(io::Error::other)?;
        Ok(Connected { channel, kind, server_certificate })
    }

    /// Connects without sending a request, and returns the error that ends the connection. In TLS
    /// 1.3, a client learns only after its handshake that the server refuses the client.
    pub(crate) async fn refusal(&self, address: SocketAddr) -> io::Error {
        let mut stream = match self.handshake(Ipv4Addr::LOCALHOST.into(), address).await {
            Ok(stream) => stream,
            Err(error) => return error,
        };
        let mut buffer = [0; 1024];
        loop {
            match timeout(GUARD, stream.read(&mut buffer)).await.expect("the connection stays open") {
                Ok(0) => return io::ErrorKind::UnexpectedEof.into(),
                Ok(_) => {}
                Err(error) => return error,
            }
        }
    }
}

/// An open stream of a node's agent, after `Welcome`.
pub(crate) struct Stream {
    pub(crate) messages: Streaming<v1::ServerMessage>,
    /// Keeps the agent's half of the stream open.
    _sender: mpsc::Sender<v1::AgentMessage>,
}

impl Stream {
    /// Reads until the stream ends, and returns its status.
    pub(crate) async fn end(mut self) -> Status {
        let ended = async {
            loop {
                match self.messages.message().await {
                    Ok(Some(_)) => {}
                    Ok(None) => return Status::ok("closed"),
                    Err(status) => return status,
                }
            }
        };
        timeout(GUARD, ended).await.expect("the stream does not end")
    }

    /// Reads until a message mentions a service.
    pub(crate) async fn until_message_about(&mut self, service: &str) {
        let heard =
            async { while !format!("{:?}", self.messages.message().await.unwrap().unwrap()).contains(service) {} };
        timeout(GUARD, heard).await.unwrap_or_else(|_| panic!("no message about {service} arrived"));
    }
}

impl Connected {
    pub(crate) async fn sync(&self, node: &str) -> Result<Stream, Status> {
        let (sender, receiver) = mpsc::channel(4);
        let hello = v1::Hello { node_name: node.into(), ..v1::Hello::default() };
        let message = v1::AgentMessage { body: Some(v1::agent_message::Body::Hello(hello)) };
        sender.send(message).await.unwrap();
        let mut client = DiscoveryClient::new(self.channel.clone());
        let mut messages = client.sync(ReceiverStream::new(receiver)).await?.into_inner();
        let welcome = timeout(GUARD, messages.message()).await.unwrap()?.and_then(|message| message.body);
        assert!(matches!(welcome, Some(v1::server_message::Body::Welcome(_))), "{welcome:?}");
        Ok(Stream { messages, _sender: sender })
    }

    pub(crate) async fn inspect(&self) -> Result<v1::GetStatusResponse, Status> {
        let mut client = InspectClient::new(self.channel.clone());
        Ok(client.get_status(v1::GetStatusRequest::default()).await?.into_inner())
    }

    /// Watches changes from now on.
    pub(crate) async fn watch(&self) -> Result<Streaming<v1::WatchEvent>, Status> {
        let mut client = InspectClient::new(self.channel.clone());
        Ok(client.watch(v1::WatchRequest::default()).await?.into_inner())
    }

    /// Sends a request that waits for a Service, with a timeout that is longer than any test.
    pub(crate) async fn wait(&self, name: &str) -> Result<Streaming<v1::WaitAnswer>, Status> {
        let mut client = InspectClient::new(self.channel.clone());
        let request = v1::WaitRequest {
            namespace: "default".into(),
            name: name.into(),
            timeout_ms: 3_600_000,
            ..Default::default()
        };
        Ok(client.wait(request).await?.into_inner())
    }

    pub(crate) async fn health(&self) -> Result<i32, Status> {
        let mut client = HealthClient::new(self.channel.clone());
        let request = HealthCheckRequest { service: "headgate.v1.Discovery".into() };
        Ok(client.check(request).await?.into_inner().status)
    }

    pub(crate) async fn reflection(&self) -> Result<(), Status> {
        let request = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let mut client = ServerReflectionClient::new(self.channel.clone());
        let requests = tokio_stream::once(request);
        let mut answers = client.server_reflection_info(requests).await?.into_inner();
        answers.message().await.map(|answer| assert!(answer.is_some()))
    }
}

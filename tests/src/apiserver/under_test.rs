//! One face for the stand-in and for a real API server, so that watch tests are written once.

use http::{Method, Request};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig, KubeconfigError},
};
use serde_json::{Value, json};

use super::{
    ApiServer, StartError,
    kinds::Kind,
    real::{ASSETS_VARIABLE, RealApiServer, RealServerError},
};

/// Why an API under test cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ApiUnderTestError {
    /// The stand-in did not start.
    #[error(transparent)]
    StandIn(#[from] StartError),
    /// The real binaries did not start.
    #[error(transparent)]
    Real(#[from] RealServerError),
    /// The kubeconfig was refused.
    #[error("the kubeconfig does not work: {0}")]
    Kubeconfig(#[from] KubeconfigError),
    /// A request failed; holds the server's Status if it sent one.
    #[error("{0}")]
    Request(#[from] kube::Error),
    /// A request could not be made from the object or names given.
    #[error("the request cannot be made: {0}")]
    BadRequest(String),
}

enum Backing {
    StandIn(ApiServer),
    Real(RealApiServer),
}

/// A running API server, stand-in or real, and a client of it. Writes go over HTTP.
///
/// On the real one objects must be valid, and it brings some of its own (the `kubernetes` Service and ServiceCIDR):
/// tests look at one namespace, or at labels that they set.
pub struct ApiUnderTest {
    client: Client,
    backing: Backing,
}

impl std::fmt::Debug for ApiUnderTest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ApiUnderTest").field("url", &self.url()).finish_non_exhaustive()
    }
}

/// The sentence for tests to print where no real server is configured; `None` where one is.
pub fn real_server_absence() -> Option<String> {
    let unset = std::env::var_os(ASSETS_VARIABLE).is_none_or(|value| value.is_empty());
    unset.then(|| format!("{ASSETS_VARIABLE} is unset: watch tests run on the stand-in API server only"))
}

impl ApiUnderTest {
    /// Starts a stand-in.
    pub async fn stand_in() -> Result<Self, ApiUnderTestError> {
        Self::of_stand_in(ApiServer::start()?).await
    }

    /// Takes a stand-in that a test has started with options of its own.
    pub async fn of_stand_in(server: ApiServer) -> Result<Self, ApiUnderTestError> {
        Ok(Self { client: client(&server.kubeconfig()).await?, backing: Backing::StandIn(server) })
    }

    /// Starts the real binaries; `None` where `KUBEBUILDER_ASSETS` is unset. Blocks the thread until they serve.
    pub async fn real() -> Result<Option<Self>, ApiUnderTestError> {
        let Some(started) = RealApiServer::from_environment() else { return Ok(None) };
        let server = started?;
        Ok(Some(Self { client: client(&server.kubeconfig()).await?, backing: Backing::Real(server) }))
    }

    /// The stand-in, and the real server where there is one; prints why where there is none.
    pub async fn all() -> Result<Vec<Self>, ApiUnderTestError> {
        let mut servers = vec![Self::stand_in().await?];
        match Self::real().await? {
            Some(real) => servers.push(real),
            None => println!("{}", real_server_absence().unwrap_or_default()),
        }
        Ok(servers)
    }

    /// `stand-in` or `kube-apiserver`, for messages.
    pub fn name(&self) -> &'static str {
        match self.backing {
            Backing::StandIn(_) => "stand-in",
            Backing::Real(_) => "kube-apiserver",
        }
    }

    /// The stand-in with its faults and counters; `None` if the server is real.
    pub fn as_stand_in(&self) -> Option<&ApiServer> {
        match &self.backing {
            Backing::StandIn(server) => Some(server),
            Backing::Real(_) => None,
        }
    }

    /// The base URL, without a slash at the end.
    pub fn url(&self) -> String {
        match &self.backing {
            Backing::StandIn(server) => server.url(),
            Backing::Real(server) => server.url(),
        }
    }

    /// The text of a kubeconfig file that leads here.
    pub fn kubeconfig(&self) -> String {
        match &self.backing {
            Backing::StandIn(server) => server.kubeconfig(),
            Backing::Real(server) => server.kubeconfig(),
        }
    }

    /// A client of kube's, with the token and the CA where the server has them.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Whether a watch may begin with the state as it is: from Kubernetes 1.32 on by default.
    pub async fn has_streaming_lists(&self) -> Result<bool, ApiUnderTestError> {
        let path = "/api/v1/nodes?watch=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan\
                    &allowWatchBookmarks=true&timeoutSeconds=1";
        match self.send(Method::GET, path, None).await {
            Err(ApiUnderTestError::Request(kube::Error::Api(status))) if status.code == 422 => Ok(false),
            // What a watch says is no single object.
            Ok(_) | Err(ApiUnderTestError::Request(kube::Error::SerdeError(_))) => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Creates an object; the namespace comes from its metadata.
    pub async fn create(&self, object: &Value) -> Result<Value, ApiUnderTestError> {
        let (kind, namespace, _) = names(object)?;
        self.send(Method::POST, &kind.collection_path(Some(&namespace)), Some(object)).await
    }

    /// Replaces an object; a resourceVersion in it must be the current one.
    pub async fn update(&self, object: &Value) -> Result<Value, ApiUnderTestError> {
        let (kind, namespace, name) = names(object)?;
        self.send(Method::PUT, &kind.object_path(&namespace, &name), Some(object)).await
    }

    /// Creates an object, or replaces it if it is there.
    pub async fn apply(&self, object: &Value) -> Result<Value, ApiUnderTestError> {
        let (kind, namespace, name) = names(object)?;
        let current = match self.get(kind, &namespace, &name).await {
            Ok(current) => current,
            Err(ApiUnderTestError::Request(kube::Error::Api(status))) if status.code == 404 => {
                return self.create(object).await;
            }
            Err(error) => return Err(error),
        };
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"].clone();
        self.update(&object).await
    }

    /// Deletes an object.
    pub async fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<(), ApiUnderTestError> {
        self.send(Method::DELETE, &kind.object_path(namespace, name), None).await.map(|_| ())
    }

    /// Reads an object.
    pub async fn get(&self, kind: Kind, namespace: &str, name: &str) -> Result<Value, ApiUnderTestError> {
        self.send(Method::GET, &kind.object_path(namespace, name), None).await
    }

    /// Makes sure that a namespace is there to write into. The stand-in needs none.
    pub async fn ensure_namespace(&self, namespace: &str) -> Result<(), ApiUnderTestError> {
        if matches!(self.backing, Backing::StandIn(_)) {
            return Ok(());
        }
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        match self.send(Method::POST, "/api/v1/namespaces", Some(&object)).await {
            Err(ApiUnderTestError::Request(kube::Error::Api(status))) if status.code == 409 => Ok(()),
            other => other.map(|_| ()),
        }
    }

    /// Ends the server until [`Self::restart`]; connections are cut and refused.
    pub fn stop(&mut self) {
        match &mut self.backing {
            Backing::StandIn(server) => server.stop(),
            Backing::Real(server) => server.stop(),
        }
    }

    /// Restarts the server with its history lost: watches from before get 410, connections are cut. Blocks until
    /// it serves again.
    pub async fn restart_without_history(&mut self) -> Result<(), ApiUnderTestError> {
        match &mut self.backing {
            Backing::StandIn(server) => server.restart(&super::Restart::LoseHistory)?,
            Backing::Real(server) => server.lose_history()?,
        }
        self.connect_anew().await
    }

    /// Restarts the server with everything kept; connections are cut. Blocks until it serves again.
    pub async fn restart(&mut self) -> Result<(), ApiUnderTestError> {
        match &mut self.backing {
            Backing::StandIn(server) => server.restart(&super::Restart::KeepHistory)?,
            Backing::Real(server) => server.restart()?,
        }
        self.connect_anew().await
    }

    /// The client may not have noticed yet that its idle connections are cut, and would send a request into one.
    async fn connect_anew(&mut self) -> Result<(), ApiUnderTestError> {
        self.client = client(&self.kubeconfig()).await?;
        Ok(())
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value, ApiUnderTestError> {
        let bytes = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let request =
            Request::builder().method(method).uri(path).header("content-type", "application/json").body(bytes);
        let request = request.map_err(|error| ApiUnderTestError::BadRequest(format!("{path}: {error}")))?;
        Ok(self.client.request(request).await?)
    }
}

async fn client(kubeconfig: &str) -> Result<Client, ApiUnderTestError> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig)?;
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await?;
    Ok(Client::try_from(config)?)
}

fn names(object: &Value) -> Result<(Kind, String, String), ApiUnderTestError> {
    let kind = Kind::of(object).ok_or_else(|| {
        ApiUnderTestError::BadRequest(format!(
            "{} {} is not a kind that is served",
            object["apiVersion"], object["kind"]
        ))
    })?;
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    Ok((kind, text("namespace"), text("name")))
}

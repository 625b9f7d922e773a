//! A common interface to the stand-in and to a real API server, so that watch tests can run against
//! both.

use anyhow::{Context as _, Result, anyhow};
use http::{Method, Request};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};

use super::{
    ApiServer, Failure,
    kinds::Kind,
    real::{ASSETS_VARIABLE, RealApiServer},
};

enum Backing {
    StandIn(ApiServer),
    Real(RealApiServer),
}

/// A running API server, stand-in or real, with a client.
///
/// The real server accepts only valid objects. It also creates its own objects (the Service and the
/// ServiceCIDR `kubernetes`), so tests must select objects by namespace or label.
pub struct ApiUnderTest {
    client: Client,
    backing: Backing,
}

impl std::fmt::Debug for ApiUnderTest {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("ApiUnderTest").field("url", &self.url()).finish_non_exhaustive()
    }
}

impl ApiUnderTest {
    /// Starts the stand-in. Also starts the real server if [`ASSETS_VARIABLE`] is set, or else
    /// prints that the variable is unset.
    ///
    /// # Errors
    /// A server does not start.
    pub async fn all() -> Result<Vec<Self>> {
        let stand_in = ApiServer::start()?;
        let client = client(&stand_in.kubeconfig()).await?;
        let mut servers = vec![Self { client, backing: Backing::StandIn(stand_in) }];
        servers.extend(Self::real().await?);
        Ok(servers)
    }

    /// Starts the real server if [`ASSETS_VARIABLE`] is set, or else prints that the variable is
    /// unset.
    ///
    /// # Errors
    /// The server does not start.
    pub async fn real() -> Result<Option<Self>> {
        let Some(started) = RealApiServer::from_environment() else {
            println!("{ASSETS_VARIABLE} is unset: this test does not run against a real API server");
            return Ok(None);
        };
        let server = started?;
        let client = client(&server.kubeconfig()).await?;
        Ok(Some(Self { client, backing: Backing::Real(server) }))
    }

    /// `stand-in` or `kube-apiserver`, for messages.
    pub fn name(&self) -> &'static str {
        match self.backing {
            Backing::StandIn(_) => "stand-in",
            Backing::Real(_) => "kube-apiserver",
        }
    }

    /// The stand-in, with its faults and counters. `None` if the server is real.
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

    /// The text of a kubeconfig file for this server.
    pub fn kubeconfig(&self) -> String {
        match &self.backing {
            Backing::StandIn(server) => server.kubeconfig(),
            Backing::Real(server) => server.kubeconfig(),
        }
    }

    /// The text of a kubeconfig file with another bearer token. The stand-in does not read tokens.
    pub fn kubeconfig_with(&self, token: &str) -> String {
        match &self.backing {
            Backing::StandIn(server) => server.kubeconfig(),
            Backing::Real(server) => server.kubeconfig_with(token),
        }
    }

    /// A kube client, with a token and a CA if the server is real.
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Creates or replaces an object.
    pub async fn apply(&self, object: &Value) -> Result<()> {
        if let Backing::StandIn(server) = &self.backing {
            return server.apply(object.clone()).map(drop).map_err(|failure| refused(&failure));
        }
        let (kind, namespace, name) = names(object)?;
        let path = kind.object_path(&namespace, &name);
        let current = match self.send(Method::GET, &path, None).await {
            Err(error) if code(&error) == Some(404) => {
                return self.send(Method::POST, &kind.collection_path(Some(&namespace)), Some(object)).await.map(drop);
            }
            current => current?,
        };
        let mut object = object.clone();
        object["metadata"]["resourceVersion"] = current["metadata"]["resourceVersion"].clone();
        self.send(Method::PUT, &path, Some(&object)).await.map(drop)
    }

    /// Deletes an object.
    pub async fn delete(&self, kind: Kind, namespace: &str, name: &str) -> Result<()> {
        if let Backing::StandIn(server) = &self.backing {
            return server.delete(kind, namespace, name).map(drop).map_err(|failure| refused(&failure));
        }
        self.send(Method::DELETE, &kind.object_path(namespace, name), None).await.map(drop)
    }

    /// Creates an object of any kind at a real server. The server checks the object against its
    /// schema, so an unknown or repeated field is an error.
    ///
    /// # Errors
    /// The server refuses the object. The stand-in refuses every object.
    pub async fn create(&self, object: &Value) -> Result<()> {
        self.create_with(object, "fieldValidation=Strict").await
    }

    /// Asks a real server whether it would create an object. The server makes all checks of
    /// [`Self::create`], and stores nothing.
    ///
    /// # Errors
    /// The server would refuse the object. The stand-in refuses every object.
    pub async fn would_create(&self, object: &Value) -> Result<()> {
        self.create_with(object, "fieldValidation=Strict&dryRun=All").await
    }

    async fn create_with(&self, object: &Value, query: &str) -> Result<()> {
        let path = format!("{}?{query}", collection(object)?);
        self.send(Method::POST, &path, Some(object)).await.map(drop)
    }

    /// Creates a namespace if it does not exist. The stand-in needs no namespaces.
    pub async fn ensure_namespace(&self, namespace: &str) -> Result<()> {
        if matches!(self.backing, Backing::StandIn(_)) {
            return Ok(());
        }
        let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}});
        match self.send(Method::POST, "/api/v1/namespaces", Some(&object)).await {
            Err(error) if code(&error) == Some(409) => Ok(()),
            other => other.map(drop),
        }
    }

    /// Stops the server until [`Self::restart`]. Connections are cut and refused.
    pub fn stop(&mut self) {
        match &mut self.backing {
            Backing::StandIn(server) => server.stop(),
            Backing::Real(server) => server.stop(),
        }
    }

    /// Restarts the server without its history, so that watches from earlier versions get 410.
    /// Connections are cut. Blocks until the server serves.
    pub async fn restart_without_history(&mut self) -> Result<()> {
        match &mut self.backing {
            Backing::StandIn(server) => server.restart(&super::Restart::LoseHistory)?,
            Backing::Real(server) => server.lose_history()?,
        }
        self.connect_anew().await
    }

    /// Restarts the server with its history. Connections are cut. Blocks until the server serves.
    pub async fn restart(&mut self) -> Result<()> {
        match &mut self.backing {
            Backing::StandIn(server) => server.restart(&super::Restart::KeepHistory)?,
            Backing::Real(server) => server.restart()?,
        }
        self.connect_anew().await
    }

    /// Replaces the client. The old client could send a request over an idle connection, which the
    /// restart has cut.
    async fn connect_anew(&mut self) -> Result<()> {
        self.client = client(&self.kubeconfig()).await?;
        Ok(())
    }

    /// Sends a request, and returns the JSON object of the answer.
    ///
    /// # Errors
    /// The server refuses the request, or the answer is not one JSON object.
    pub async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let bytes = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        Ok(self.client.request(request.body(bytes)?).await?)
    }
}

fn refused(failure: &Failure) -> anyhow::Error {
    anyhow!("{}", failure.body)
}

/// The HTTP code with which a server refused a request.
fn code(error: &anyhow::Error) -> Option<u16> {
    match error.downcast_ref() {
        Some(kube::Error::Api(status)) => Some(status.code),
        _ => None,
    }
}

/// A kube client for the text of a kubeconfig file.
///
/// # Errors
/// The text is not a kubeconfig.
pub async fn client(kubeconfig: &str) -> Result<Client> {
    let kubeconfig = Kubeconfig::from_yaml(kubeconfig)?;
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

fn names(object: &Value) -> Result<(Kind, String, String)> {
    let kind = Kind::of(object).with_context(|| format!("the API servers do not serve {}", object["kind"]))?;
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default().to_owned();
    Ok((kind, text("namespace"), text("name")))
}

/// The path of the collection that an object of any kind belongs to.
fn collection(object: &Value) -> Result<String> {
    let text = |field: &str| object[field].as_str().with_context(|| format!("the object has no {field}: {object}"));
    let (version, kind) = (text("apiVersion")?, text("kind")?);
    let root = if version == "v1" { "/api/v1".to_owned() } else { format!("/apis/{version}") };
    let namespace = object["metadata"]["namespace"].as_str();
    let namespace = namespace.map(|namespace| format!("/namespaces/{namespace}")).unwrap_or_default();
    Ok(format!("{root}{namespace}/{}s", kind.to_lowercase()))
}

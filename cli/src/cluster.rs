//! The API server of a cluster, as `migrate run` and `cleanup` use it: with a kubeconfig and the
//! rights of the user, as kubectl does.

use std::fmt::Display;
use std::io::{self, Write};

use data_encoding::BASE64;
use hyper::Request;
// kube needs the choice of a version of the API, which is a feature of this crate.
use k8s_openapi as _;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::answer::{Failure, Session};
use crate::args::{Args, ClusterArgs, DEFAULT_SERVER, Output, TlsArgs};
use crate::certs::{self, CertsArgs};
use crate::client;
use crate::render::Style;

/// The type of every patch: `null` removes a field.
const MERGE_PATCH: &str = "application/merge-patch+json";

/// The name in the certificate of a reader that the command makes for itself.
const READER: &str = "headgatectl";

/// A client of the API server.
pub(crate) struct Cluster(Client);

impl Cluster {
    pub(crate) async fn open(args: &ClusterArgs) -> Result<Self, Failure> {
        let failed = |error: &dyn Display| Failure::Cluster(format!("the kubeconfig cannot be used: {error}"));
        let options = KubeConfigOptions { context: args.context.clone(), ..KubeConfigOptions::default() };
        let kubeconfig = match &args.kubeconfig {
            None if args.context.is_none() => None,
            None => Some(Kubeconfig::read()),
            Some(path) => Some(Kubeconfig::read_from(path)),
        };
        let config = match kubeconfig.transpose().map_err(|error| failed(&error))? {
            None => Config::infer().await.map_err(|error| failed(&error))?,
            Some(file) => Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(&error))?,
        };
        Client::try_from(config).map(Self).map_err(|error| failed(&error))
    }

    async fn send(&self, method: &str, path: &str, kind: &str, body: Option<&Value>) -> Result<Option<Value>, Failure> {
        let request = Request::builder().method(method).uri(path).header("content-type", kind);
        let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let failed = |error: &dyn Display| {
            Failure::Cluster(format!("{method} {} at the API server: {error}", path.split('?').next().unwrap_or(path)))
        };
        let request = request.body(body).map_err(|error| failed(&error))?;
        match self.0.request::<Value>(request).await {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(kube::Error::Api(status)) => Err(failed(&status.message)),
            Err(error) => Err(failed(&client::chain(&error))),
        }
    }

    /// An object; `None` if it does not exist.
    pub(crate) async fn get(&self, path: &str) -> Result<Option<Value>, Failure> {
        self.send("GET", path, "application/json", None).await
    }

    /// The objects of a collection that the selectors `labels` and `fields` select.
    pub(crate) async fn list(&self, path: &str, labels: &str, fields: &str) -> Result<Vec<Value>, Failure> {
        let query = serde_urlencoded::to_string([("labelSelector", labels), ("fieldSelector", fields)]);
        let mut list = self.get(&format!("{path}?{}", query.unwrap_or_default())).await?.unwrap_or_default();
        Ok(list["items"].as_array_mut().map(std::mem::take).unwrap_or_default())
    }

    /// Changes an object by a merge patch.
    pub(crate) async fn patch(&self, path: &str, patch: &Value) -> Result<(), Failure> {
        let missing = || Failure::Cluster(format!("{path} no longer exists"));
        self.send("PATCH", path, MERGE_PATCH, Some(patch)).await?.map(drop).ok_or_else(missing)
    }

    /// Creates an object in a collection.
    pub(crate) async fn create(&self, path: &str, object: &Value) -> Result<(), Failure> {
        let missing = || Failure::Cluster(format!("{path} does not exist: install Headgate first"));
        self.send("POST", path, "application/json", Some(object)).await?.map(drop).ok_or_else(missing)
    }

    /// Deletes an object and what belongs to it.
    pub(crate) async fn delete(&self, path: &str) -> Result<(), Failure> {
        let options = json!({ "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background" });
        self.send("DELETE", path, "application/json", Some(&options)).await.map(drop)
    }

    /// Connects to a replica. If the command line names neither a server nor TLS files, and Helm
    /// has made the certificates of a trial, signs a reader's certificate for a day with their
    /// authority.
    pub(crate) async fn session<'a>(
        &self,
        args: &Args,
        of: &ClusterArgs,
        style: Style,
        out: &'a mut dyn Write,
    ) -> Result<Session<'a>, Failure> {
        if args.tls.tls_ca.is_some() || args.server.join(",") != DEFAULT_SERVER {
            return Session::open(args, style, out).await;
        }
        let namespace = format!("/api/v1/namespaces/{}", of.install_namespace);
        // A user without the right to read this Secret has a certificate of their own.
        let secret = self.get(&format!("{namespace}/secrets/headgate-authority")).await.ok().flatten();
        let settings = self.get(&format!("{namespace}/configmaps/headgate-settings")).await.ok().flatten();
        let (Some(secret), Some(settings)) = (secret, settings) else { return Session::open(args, style, out).await };
        let folder = authority(&secret)
            .map_err(|error| Failure::Cluster(format!("a folder for the certificate of a reader: {error}")))?;
        certs::make(&CertsArgs {
            out: folder.path().to_owned(),
            node: Vec::new(),
            server_name: Vec::new(),
            server_ip: Vec::new(),
            reader: vec![READER.to_owned()],
            days: 1,
            force: false,
        })?;
        let file = |name: &str| Some(folder.path().join(name));
        let tls = TlsArgs {
            tls_ca: file("ca.crt"),
            tls_cert: file(&format!("readers/{READER}.crt")),
            tls_key: file(&format!("readers/{READER}.key")),
            tls_server_name: None,
        };
        let urls = settings["data"]["controlPlane"].as_str().unwrap_or_default();
        // The chart has the ports of agents; readers ask at the next one.
        let servers: Vec<String> = urls.split(',').map(|url| url.replace(":7443", ":7444")).collect();
        let replica = client::connect(&servers, &tls).await.map_err(Failure::Connect)?;
        Ok(Session { style, ..Session::new(replica, Output::Table, out) })
    }
}

/// A folder with the files of the authority in a Secret, only for this user and this command.
fn authority(secret: &Value) -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    for (key, file) in [("tls.crt", "ca.crt"), ("tls.key", "ca.key")] {
        let text = secret["data"][key].as_str().unwrap_or_default();
        let content = BASE64.decode(text.as_bytes()).map_err(io::Error::other)?;
        std::fs::write(folder.path().join(file), content)?;
    }
    Ok(folder)
}

//! Calls to the engine: each with a deadline, each failure sorted into what the backend must tell apart.
//!
//! Owns the connection and the few calls that the backend needs. The engine's exec, archive, build and commit calls are not
//! used anywhere: they act on names that a guest can write, with the engine's rights.

use std::collections::HashMap;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bollard::container::AttachContainerResults;
use bollard::models::{ContainerCreateBody, ContainerInspectResponse, ContainerSummary, ImageInspect, SystemInfo};
use bollard::query_parameters::{
    AttachContainerOptions, CreateContainerOptions, CreateImageOptions, InspectContainerOptions, ListContainersOptions,
    RemoveContainerOptions, StartContainerOptions, StopContainerOptions,
};
use bytes::Bytes;
use futures::{Stream, TryStreamExt};

/// For calls that only look something up or change a flag.
const QUICK: Duration = Duration::from_secs(30);
/// For calls that make or end processes.
const SLOW: Duration = Duration::from_secs(90);
/// For the import of an image.
const IMPORT: Duration = Duration::from_secs(900);

/// Why a call gave nothing.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    NotFound(String),
    /// The thing is there already, or in a state that does not allow the call.
    #[error("{0}")]
    Conflict(String),
    #[error("the engine refuses: {0}")]
    Refused(String),
    #[error("the engine did not answer within {} s", .0.as_secs())]
    Deadline(Duration),
    #[error("the engine cannot be talked to: {0}")]
    Broken(String),
}

impl From<bollard::errors::Error> for Failure {
    fn from(error: bollard::errors::Error) -> Self {
        use bollard::errors::Error;
        match error {
            Error::DockerResponseServerError {
                status_code: 404,
                message,
            } => Self::NotFound(message),
            Error::DockerResponseServerError {
                status_code: 409,
                message,
            } => Self::Conflict(message),
            Error::DockerResponseServerError { message, .. } | Error::DockerStreamError { error: message } => {
                Self::Refused(message)
            }
            other => Self::Broken(crate::error::chain(&other)),
        }
    }
}

/// The engine at one unix socket.
#[derive(Debug, Clone)]
pub struct Engine {
    docker: bollard::Docker,
}

/// The socket that the operator's environment points at: `DOCKER_HOST` when it is a `unix://` address, else the usual one.
///
/// # Errors
/// The address, when `DOCKER_HOST` names an engine on another machine: it could not mount our directories.
pub fn default_socket() -> Result<PathBuf, String> {
    match std::env::var("DOCKER_HOST") {
        Ok(host) if !host.is_empty() => match host.strip_prefix("unix://") {
            Some(path) => Ok(path.into()),
            None => Err(host),
        },
        Ok(_) | Err(_) => Ok("/var/run/docker.sock".into()),
    }
}

async fn within<T>(
    limit: Duration,
    call: impl Future<Output = Result<T, bollard::errors::Error>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map_err(Failure::from),
        Err(_) => Err(Failure::Deadline(limit)),
    }
}

impl Engine {
    /// Connects and agrees on a version of the API.
    pub async fn connect(socket: &Path) -> Result<Self, Failure> {
        let path = socket
            .to_str()
            .ok_or_else(|| Failure::Broken("the socket's path is not UTF-8".into()))?;
        // Ours is the deadline that counts; the client's own is only longer.
        let docker = bollard::Docker::connect_with_unix(path, IMPORT.as_secs() + 1, bollard::API_DEFAULT_VERSION)?;
        let docker = within(QUICK, docker.negotiate_version()).await?;
        Ok(Self { docker })
    }

    pub async fn info(&self) -> Result<SystemInfo, Failure> {
        within(QUICK, self.docker.info()).await
    }

    pub async fn image(&self, name: &str) -> Result<ImageInspect, Failure> {
        within(QUICK, self.docker.inspect_image(name)).await
    }

    /// Makes the image `repo:tag` out of a tar of its root file system.
    pub async fn import(
        &self,
        repo: &str,
        tag: &str,
        rootfs: impl Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    ) -> Result<(), Failure> {
        let options = CreateImageOptions {
            from_src: Some("-".into()),
            repo: Some(repo.into()),
            tag: Some(tag.into()),
            ..CreateImageOptions::default()
        };
        let answers = self
            .docker
            .create_image(Some(options), Some(bollard::body_try_stream(rootfs)), None);
        within(IMPORT, answers.try_for_each(|_| async { Ok(()) })).await
    }

    /// Makes a container; the answer is its id and what the engine could not do as asked.
    pub async fn create(&self, name: &str, body: ContainerCreateBody) -> Result<(String, Vec<String>), Failure> {
        let options = CreateContainerOptions {
            name: Some(name.into()),
            ..CreateContainerOptions::default()
        };
        let made = within(SLOW, self.docker.create_container(Some(options), body)).await?;
        Ok((made.id, made.warnings))
    }

    pub async fn start(&self, container: &str) -> Result<(), Failure> {
        within(
            SLOW,
            self.docker.start_container(container, None::<StartContainerOptions>),
        )
        .await
    }

    /// The standard streams of a container, from now on.
    pub async fn attach(&self, container: &str) -> Result<AttachContainerResults, Failure> {
        let options = AttachContainerOptions {
            stream: true,
            stdin: true,
            stdout: true,
            ..AttachContainerOptions::default()
        };
        within(QUICK, self.docker.attach_container(container, Some(options))).await
    }

    pub async fn inspect(&self, container: &str) -> Result<ContainerInspectResponse, Failure> {
        within(
            QUICK,
            self.docker
                .inspect_container(container, None::<InspectContainerOptions>),
        )
        .await
    }

    /// Every container, running or not, that carries all of these labels.
    pub async fn list(&self, labels: &[(&str, &str)]) -> Result<Vec<ContainerSummary>, Failure> {
        let wanted: Vec<String> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        self.list_with(&wanted).await
    }

    /// The same for labels in the engine's words: `NAME` or `NAME=VALUE`.
    pub async fn list_with(&self, labels: &[String]) -> Result<Vec<ContainerSummary>, Failure> {
        let options = ListContainersOptions {
            all: true,
            filters: Some(HashMap::from([("label".to_owned(), labels.to_vec())])),
            ..ListContainersOptions::default()
        };
        within(QUICK, self.docker.list_containers(Some(options))).await
    }

    pub async fn pause(&self, container: &str) -> Result<(), Failure> {
        within(QUICK, self.docker.pause_container(container)).await
    }

    pub async fn unpause(&self, container: &str) -> Result<(), Failure> {
        within(QUICK, self.docker.unpause_container(container)).await
    }

    /// SIGTERM to PID 1, and SIGKILL to all after `grace`, which counts in whole seconds.
    pub async fn stop(&self, container: &str, grace: Duration) -> Result<(), Failure> {
        let seconds = grace.as_millis().div_ceil(1000).min(3600) as i32;
        let options = StopContainerOptions {
            t: Some(seconds),
            ..StopContainerOptions::default()
        };
        within(SLOW + grace, self.docker.stop_container(container, Some(options))).await
    }

    /// Kills and removes the container with its anonymous volumes.
    pub async fn remove(&self, container: &str) -> Result<(), Failure> {
        let options = RemoveContainerOptions {
            v: true,
            force: true,
            link: false,
        };
        within(SLOW, self.docker.remove_container(container, Some(options))).await
    }
}

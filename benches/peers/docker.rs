//! A Docker engine, through its HTTP interface.

use bollard::exec::{StartExecOptions, StartExecResults};
use bollard::models::{ContainerCreateBody, ExecConfig, HostConfig};
use bollard::query_parameters::{
    CreateContainerOptions, LogsOptions, RemoveContainerOptions, StartContainerOptions, WaitContainerOptions,
};
use futures::StreamExt;

use super::Result;

/// A Docker engine, through its HTTP interface.
pub struct Engine {
    docker: bollard::Docker,
    image: String,
    warm: String,
}

impl Engine {
    pub async fn open() -> Result<Self> {
        let docker = bollard::Docker::connect_with_local_defaults()?
            .negotiate_version()
            .await?;
        let image = std::env::var("EXUVIA_BENCH_IMAGE").unwrap_or_else(|_| "exuvia/python".to_owned());
        docker.inspect_image(&image).await?;
        let mut engine = Self {
            docker,
            image,
            warm: String::new(),
        };
        engine.warm = engine.create(&["sleep", "100000"]).await?;
        engine
            .docker
            .start_container(&engine.warm, None::<StartContainerOptions>)
            .await?;
        Ok(engine)
    }

    async fn create(&self, words: &[&str]) -> Result<String> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        let body = ContainerCreateBody {
            image: Some(self.image.clone()),
            entrypoint: Some(Vec::new()),
            cmd: Some(words),
            host_config: Some(HostConfig {
                network_mode: Some("none".to_owned()),
                ..HostConfig::default()
            }),
            ..ContainerCreateBody::default()
        };
        Ok(self
            .docker
            .create_container(None::<CreateContainerOptions>, body)
            .await?
            .id)
    }

    /// Create, start, wait, read what it printed, delete.
    pub async fn cold(&self, words: &[&str]) -> Result<()> {
        let id = self.create(words).await?;
        // Asked before it starts: it may end at once.
        let mut ended = self.docker.wait_container(
            &id,
            Some(WaitContainerOptions {
                condition: "next-exit".to_owned(),
            }),
        );
        let (started, ended) = tokio::join!(
            self.docker.start_container(&id, None::<StartContainerOptions>),
            ended.next()
        );
        started?;
        ended.ok_or("the engine did not tell of the end")??;
        let printed = LogsOptions {
            stdout: true,
            stderr: true,
            ..LogsOptions::default()
        };
        let mut printed = self.docker.logs(&id, Some(printed));
        while printed.next().await.transpose()?.is_some() {}
        self.delete(&id).await
    }

    pub async fn exec(&self, words: &[&str]) -> Result<()> {
        let config = ExecConfig {
            cmd: Some(words.iter().map(|word| (*word).to_owned()).collect()),
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            ..ExecConfig::default()
        };
        let id = self.docker.create_exec(&self.warm, config).await?.id;
        match self.docker.start_exec(&id, None::<StartExecOptions>).await? {
            StartExecResults::Attached { mut output, .. } => while output.next().await.transpose()?.is_some() {},
            StartExecResults::Detached => return Err("the exec is detached".into()),
        }
        match self.docker.inspect_exec(&id).await?.exit_code {
            Some(0) => Ok(()),
            other => Err(format!("the exec ended with {other:?}").into()),
        }
    }

    async fn delete(&self, id: &str) -> Result<()> {
        let options = RemoveContainerOptions {
            force: true,
            ..RemoveContainerOptions::default()
        };
        Ok(self.docker.remove_container(id, Some(options)).await?)
    }

    pub async fn close(&self) -> Result<()> {
        self.delete(&self.warm).await
    }
}

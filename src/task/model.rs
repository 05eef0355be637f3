//! Which model a task names, and its client.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::openai::{OpenAi, Settings};
use crate::model::price::{self, Price};
use crate::model::scripted::Scripted;
use crate::model::spec::ModelSpec;
use crate::model::{Error, ModelClient, Usage};
use crate::secret::CredentialRef;

/// Who answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Model {
    /// A recorded script, kept whole so that a run needs no file to go on.
    Scripted { name: String, jsonl: String },
    Openai {
        model: String,
        base_url: Option<String>,
        credential: Option<String>,
        price: Option<Price>,
    },
}

impl Model {
    /// For people; a script is always called one.
    pub fn label(&self) -> String {
        match self {
            Self::Scripted { name, .. } => format!("scripted:{name}"),
            Self::Openai {
                model, base_url: None, ..
            } => format!("openai:{model}"),
            Self::Openai {
                model,
                base_url: Some(url),
                ..
            } => format!("openai:{model}@{url}"),
        }
    }

    /// Reads what a person wrote (`scripted:FILE`, `openai:MODEL@URL`), the script included.
    ///
    /// # Errors
    /// [`Error::Config`] for a spec or a credential reference that makes no sense, or a script that cannot be read.
    pub fn from_spec(text: &str, credential: Option<String>) -> Result<Self, Error> {
        let spec: ModelSpec = text.parse().map_err(|error| Error::Config(format!("{error}")))?;
        let default_key = spec
            .default_key(|name| std::env::var_os(name).is_some())
            .map(|name| format!("env:{name}"));
        match spec {
            ModelSpec::Scripted { path } => {
                let jsonl = std::fs::read_to_string(&path)
                    .map_err(|error| Error::Config(format!("cannot read the script `{}`: {error}", path.display())))?;
                let name = path
                    .file_name()
                    .unwrap_or(path.as_os_str())
                    .to_string_lossy()
                    .into_owned();
                Ok(Self::Scripted { name, jsonl })
            }
            ModelSpec::OpenAi { model, base_url } => Ok(Self::Openai {
                model,
                base_url,
                credential: credential.or(default_key),
                price: None,
            }),
        }
    }

    /// The client, with its credential resolved.
    ///
    /// # Errors
    /// [`Error::Config`] for a bad script or a credential that cannot be had.
    pub fn client(&self) -> Result<Arc<dyn ModelClient>, Error> {
        match self {
            Self::Scripted { name, jsonl } => Ok(Arc::new(Scripted::parse(name, jsonl)?)),
            Self::Openai {
                model,
                base_url,
                credential,
                ..
            } => {
                let reference = credential.as_deref().map(str::parse::<CredentialRef>).transpose();
                let reference = reference.map_err(|error| Error::Config(error.to_string()))?;
                let key = reference.map(|reference| reference.resolve()).transpose();
                let key = key.map_err(|error| Error::Config(crate::error::chain(&error)))?;
                Ok(Arc::new(OpenAi::new(Settings::new(model, base_url.as_deref(), key))?))
            }
        }
    }

    /// What `usage` cost; `None` when the price is not known. A script costs nothing.
    pub fn cost_micros(&self, usage: Usage) -> Option<u64> {
        match self {
            Self::Scripted { .. } => Some(0),
            Self::Openai { price, .. } => price::cost_micros(price.as_ref(), usage),
        }
    }

    /// Whether a cost budget can be kept with it.
    pub fn is_priced(&self) -> bool {
        match self {
            Self::Scripted { .. } => true,
            Self::Openai { price, .. } => price.is_some(),
        }
    }
}

//! Which model a task names, and its client.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::model::masked::Masked;
use crate::model::openai::{OpenAi, Settings};
use crate::model::price::{self, Price};
use crate::model::scripted::Scripted;
use crate::model::spec::ModelSpec;
use crate::model::{Error, ModelClient, Usage};
use crate::secret::{CredentialRef, Redactor};

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
        Self::from_spec_where(text, credential, |name| std::env::var_os(name).is_some())
    }

    /// As `from_spec`; `is_set` tells which variables this process has.
    fn from_spec_where(text: &str, credential: Option<String>, is_set: impl Fn(&str) -> bool) -> Result<Self, Error> {
        let spec: ModelSpec = text.parse().map_err(|error| Error::Config(format!("{error}")))?;
        let default_key = spec.default_key(is_set).map(str::to_owned);
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
    /// [`Error::Config`] for a bad script, a credential that cannot be had, or none for the default endpoint.
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
                if base_url.is_none() && key.is_none() {
                    let text =
                        "no key: set EXUVIA_MODEL_KEY, or name an endpoint that needs none (`openai:MODEL@BASE_URL`)";
                    return Err(Error::Config(text.to_owned()));
                }
                let redactor = Redactor::new(key.iter().map(|key| ("model key", key)));
                let client = OpenAi::new(Settings::new(model, base_url.as_deref(), key))?;
                Ok(Arc::new(Masked::new(Arc::new(client), redactor)))
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What stands in the environment is referred to, in the form that a credential is resolved by.
    #[test]
    fn a_key_in_the_environment_is_referred_to() {
        let credential = |given: Option<&str>| {
            let made = Model::from_spec_where("openai:m@http://127.0.0.1:1/v1", given.map(str::to_owned), |name| {
                name == "EXUVIA_MODEL_KEY"
            });
            match made.unwrap() {
                Model::Openai { credential, .. } => credential.unwrap(),
                Model::Scripted { .. } => panic!("not a script"),
            }
        };
        let reference: CredentialRef = credential(None).parse().unwrap();
        assert_eq!(reference, CredentialRef::Env("EXUVIA_MODEL_KEY".to_owned()));
        assert_eq!(credential(Some("file:/key")), "file:/key");
    }

    #[test]
    fn what_cannot_be_had_is_a_config_error() {
        let missing = Model::from_spec("scripted:/nonexistent/x.jsonl", None);
        assert!(matches!(missing, Err(Error::Config(text)) if text.contains("/nonexistent/x.jsonl")));
        let keyless = Model::from_spec_where("openai:m", None, |_| false).unwrap();
        assert!(matches!(keyless.client(), Err(Error::Config(text)) if text.contains("no key")));
    }
}

//! A client whose answers never carry its own key: an endpoint may echo it, and what a model says goes into the journal, the
//! audit record and every output.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use super::{Error, ModelClient, Reply, Request, TokenSink};
use crate::secret::{Redacting, Redactor};

/// Masks secrets in all that `inner` gives.
#[derive(Debug)]
pub struct Masked {
    inner: Arc<dyn ModelClient>,
    redactor: Redactor,
}

impl Masked {
    pub fn new(inner: Arc<dyn ModelClient>, redactor: Redactor) -> Self {
        Self { inner, redactor }
    }
}

#[async_trait]
impl ModelClient for Masked {
    fn label(&self) -> String {
        self.inner.label()
    }

    fn is_scripted(&self) -> bool {
        self.inner.is_scripted()
    }

    async fn complete(&self, request: &Request, tokens: &dyn TokenSink) -> Result<Reply, Error> {
        let masking = Masking {
            to: tokens,
            stream: Mutex::new(self.redactor.stream()),
        };
        let mut reply = self.inner.complete(request, &masking).await?;
        masking.finish();
        let mask = |text: &mut String| *text = self.redactor.text(text);
        reply.message.content.iter_mut().for_each(mask);
        for call in &mut reply.message.tool_calls {
            [&mut call.id, &mut call.name, &mut call.arguments]
                .into_iter()
                .for_each(mask);
        }
        mask(&mut reply.model);
        Ok(reply)
    }
}

/// Masks a stream of text, across the borders of its pieces.
#[derive(Debug)]
struct Masking<'a> {
    to: &'a dyn TokenSink,
    stream: Mutex<Redacting>,
}

impl Masking<'_> {
    fn finish(self) {
        let rest = self
            .stream
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
            .finish();
        self.to.token(&String::from_utf8_lossy(&rest));
    }
}

impl TokenSink for Masking<'_> {
    fn token(&self, text: &str) {
        let bytes = self
            .stream
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(text.as_bytes());
        if !bytes.is_empty() {
            self.to.token(&String::from_utf8_lossy(&bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use secrecy::SecretString;

    use super::*;
    use crate::model::scripted::Scripted;
    use crate::model::{Message, NoTokens};

    #[tokio::test]
    async fn an_echoed_key_is_masked_in_text_and_arguments() {
        let script = r#"{"content":"key is sk-very-secret","tool_calls":[{"function":{"name":"shell","arguments":"{\"command\":\"echo sk-very-secret\"}"}}]}"#;
        let inner = Arc::new(Scripted::parse("echo", script).unwrap());
        let key = SecretString::from("sk-very-secret");
        let client = Masked::new(inner, Redactor::new([("model key", &key)]));
        let request = Request {
            messages: vec![Message::User {
                content: "hello".into(),
            }],
            tools: Vec::new(),
            timeout: Duration::from_secs(5),
        };
        let reply = client.complete(&request, &NoTokens).await.unwrap();
        assert_eq!(reply.message.content.as_deref(), Some("key is [redacted model key]"));
        assert_eq!(
            reply.message.tool_calls[0].arguments,
            r#"{"command":"echo [redacted model key]"}"#
        );
    }
}

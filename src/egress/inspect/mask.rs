//! What is masked on its way in: every value that was ever put into a request, in all forms that the redactor knows.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use http::HeaderValue;
use secrecy::{ExposeSecret, SecretString};

use crate::secret::Redactor;

#[derive(Debug, Default)]
pub(in crate::egress) struct Mask(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// By the value's hash; a value that was rotated out is still masked.
    known: HashMap<blake3::Hash, SecretString>,
    redactor: Option<Redactor>,
}

impl Mask {
    pub fn learn(&self, value: &SecretString) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let hash = blake3::hash(value.expose_secret().as_bytes());
        if state.known.insert(hash, value.clone()).is_none() {
            state.redactor = None;
        }
    }

    pub fn redactor(&self) -> Redactor {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let State { known, redactor } = &mut *state;
        let made = redactor.get_or_insert_with(|| Redactor::keeping_length(known.values().map(|value| ("", value))));
        made.clone()
    }
}

/// A header's value with every secret masked.
pub(super) fn masked(redactor: &Redactor, value: &HeaderValue) -> HeaderValue {
    let mut stream = redactor.stream();
    let mut out = stream.push(value.as_bytes());
    out.extend(stream.finish());
    // Stars for bytes: what was a value still is one.
    HeaderValue::from_bytes(&out).unwrap_or_else(|_| HeaderValue::from_static("*"))
}

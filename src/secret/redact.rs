//! The redactor: masks known secrets in whatever is about to leave, also where a stream cuts them in two.
//!
//! Known forms: raw, in JSON text, percent-encoded (either case, and `+` for a space), and base64 (both alphabets, at
//! any of the three alignments that a longer encoded text can give it). Unknown forms (hex, compressed, reversed) pass: this
//! is the last net, not the wall. It holds the secrets in plain memory for as long as it lives.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use secrecy::{ExposeSecret, SecretString};

/// An encoded form shorter than this is left alone: it would be found everywhere.
const MIN_ENCODED: usize = 6;

/// Masks a fixed set of secrets. Cheap to clone.
#[derive(Clone)]
pub struct Redactor(Arc<Known>);

struct Known {
    needles: Vec<Vec<u8>>,
    /// By needle.
    masks: Vec<String>,
    /// `None` where there is nothing to find.
    finder: Option<AhoCorasick>,
    longest: usize,
}

impl fmt::Debug for Redactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redactor")
            .field("forms", &self.0.needles.len())
            .finish()
    }
}

impl Redactor {
    /// `secrets` by a name that may be shown: `[redacted NAME]` takes their place. Empty ones are skipped.
    pub fn new<'a>(secrets: impl IntoIterator<Item = (&'a str, &'a SecretString)>) -> Self {
        Self::masking_with(secrets, |name, _| format!("[redacted {name}]"))
    }

    /// Stars take the place of each byte: for formats that count bytes.
    pub fn keeping_length<'a>(secrets: impl IntoIterator<Item = (&'a str, &'a SecretString)>) -> Self {
        Self::masking_with(secrets, |_, form| "*".repeat(form.len()))
    }

    fn masking_with<'a>(
        secrets: impl IntoIterator<Item = (&'a str, &'a SecretString)>,
        mask: impl Fn(&str, &[u8]) -> String,
    ) -> Self {
        // Sorted, so that two secrets with a common form always give the same mask.
        let mut forms: BTreeMap<Vec<u8>, String> = BTreeMap::new();
        for (name, secret) in secrets {
            for form in forms_of(secret.expose_secret()) {
                let mask = mask(name, &form);
                forms.entry(form).or_insert(mask);
            }
        }
        let (needles, masks): (Vec<_>, Vec<_>) = forms.into_iter().unzip();
        let finder = (!needles.is_empty()).then(|| {
            let mut builder = AhoCorasick::builder();
            builder.match_kind(MatchKind::LeftmostLongest);
            builder
                .build(&needles)
                .expect("credentials are small: `CredentialRef::resolve` bounds them")
        });
        Self(Arc::new(Known {
            longest: needles.iter().map(Vec::len).max().unwrap_or(0),
            needles,
            masks,
            finder,
        }))
    }

    /// `text` with every secret masked.
    pub fn text(&self, text: &str) -> String {
        match &self.0.finder {
            Some(finder) => finder.replace_all(text, &self.0.masks),
            None => text.to_owned(),
        }
    }

    /// For text that comes in pieces.
    pub fn stream(&self) -> Redacting {
        Redacting {
            redactor: self.clone(),
            held: Vec::new(),
        }
    }
}

/// One stream on its way out. What could be the beginning of a secret is held back until it is known.
pub struct Redacting {
    redactor: Redactor,
    held: Vec<u8>,
}

impl fmt::Debug for Redacting {
    /// What is held back may be most of a secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Redacting").field("held", &self.held.len()).finish()
    }
}

impl Redacting {
    /// Takes the next piece, gives what can go out now.
    pub fn push(&mut self, piece: &[u8]) -> Vec<u8> {
        self.held.extend_from_slice(piece);
        let open = self.redactor.open_tail(&self.held);
        self.release(open)
    }

    /// Gives the rest.
    pub fn finish(mut self) -> Vec<u8> {
        let all = self.held.len();
        self.release(all)
    }

    /// Masks all that begins before `open` and gives it; the rest stays.
    fn release(&mut self, open: usize) -> Vec<u8> {
        let known = &self.redactor.0;
        let mut out = Vec::with_capacity(open);
        let mut done = 0;
        for found in known.finder.iter().flat_map(|finder| finder.find_iter(&self.held)) {
            if found.start() >= open {
                break;
            }
            out.extend_from_slice(&self.held[done..found.start()]);
            out.extend_from_slice(known.masks[found.pattern().as_usize()].as_bytes());
            done = found.end();
        }
        if done < open {
            out.extend_from_slice(&self.held[done..open]);
            done = open;
        }
        self.held.drain(..done);
        out
    }
}

impl Redactor {
    /// Where the earliest beginning of a secret starts that `bytes` ends within; their length where there is none.
    fn open_tail(&self, bytes: &[u8]) -> usize {
        let first = bytes.len().saturating_sub(self.0.longest.saturating_sub(1));
        let begins = |tail: &[u8]| {
            self.0
                .needles
                .iter()
                .any(|needle| needle.len() > tail.len() && needle.starts_with(tail))
        };
        (first..bytes.len())
            .find(|start| begins(&bytes[*start..]))
            .unwrap_or(bytes.len())
    }
}

fn forms_of(secret: &str) -> Vec<Vec<u8>> {
    if secret.is_empty() {
        return Vec::new();
    }
    let json = serde_json::Value::from(secret).to_string();
    let upper = percent_encoded(secret);
    let encoded = [
        json[1..json.len() - 1].to_owned(),
        lower_escapes(&upper),
        upper.replace("%20", "+"),
        upper,
    ];
    let engines = [STANDARD_NO_PAD, URL_SAFE_NO_PAD];
    let base64 = engines
        .iter()
        .flat_map(|engine| (0..3).map(|offset| base64_at(engine, secret.as_bytes(), offset)));
    let all = encoded
        .into_iter()
        .chain(base64)
        .filter(|form| form.len() >= MIN_ENCODED);
    std::iter::once(secret.to_owned())
        .chain(all)
        .map(String::into_bytes)
        .collect()
}

/// The part of the base64 of a longer text that `secret`, at an offset that leaves `offset` when divided by 3, decides alone.
fn base64_at(engine: &impl Engine, secret: &[u8], offset: usize) -> String {
    let mut bytes = vec![0; offset];
    bytes.extend_from_slice(secret);
    let text = engine.encode(&bytes);
    let first = (offset * 8).div_ceil(6);
    let last = bytes.len() * 8 / 6;
    text.get(first..last).unwrap_or_default().to_owned()
}

/// RFC 3986, section 2.3: all but unreserved characters.
fn percent_encoded(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => char::from(byte).to_string(),
        other => format!("%{other:02X}"),
    };
    text.bytes().map(encode).collect()
}

fn lower_escapes(text: &str) -> String {
    let mut parts = text.split('%');
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |out, part| {
        format!("{out}%{}{}", part[..2].to_ascii_lowercase(), &part[2..])
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn redactor(secrets: &[(&str, &str)]) -> Redactor {
        let secrets: Vec<(&str, SecretString)> = secrets.iter().map(|(name, text)| (*name, (*text).into())).collect();
        Redactor::new(secrets.iter().map(|(name, secret)| (*name, secret)))
    }

    #[test]
    fn every_form_is_masked() {
        let secret = "p@ss \"wörd\"/+=x";
        let redactor = redactor(&[("key", secret)]);
        let json = serde_json::to_string(&serde_json::json!({ "token": secret })).unwrap();
        assert_eq!(redactor.text(secret), "[redacted key]");
        assert_eq!(redactor.text(&json), r#"{"token":"[redacted key]"}"#);
        assert_eq!(redactor.text(&percent_encoded(secret)), "[redacted key]");
        assert_eq!(redactor.text("p%40ss+%22w%C3%B6rd%22%2F%2B%3Dx"), "[redacted key]");
        assert_eq!(redactor.text("p%40ss%20%22w%c3%b6rd%22%2f%2b%3dx"), "[redacted key]");
        for before in ["", "a", "ab", "abc", "Bearer "] {
            for after in ["", "z", "zz", "\n"] {
                let text = format!("{before}{secret}{after}");
                for engine in [STANDARD_NO_PAD, URL_SAFE_NO_PAD] {
                    let masked = redactor.text(&engine.encode(&text));
                    assert!(masked.contains("[redacted key]"), "{text} gave {masked}");
                }
            }
        }
    }

    #[test]
    fn two_secrets_of_which_one_begins_the_other_are_told_apart() {
        let redactor = redactor(&[("short", "abcdef"), ("long", "abcdefgh")]);
        assert_eq!(redactor.text("abcdefgh abcdefg"), "[redacted long] [redacted short]g");
        let mut stream = redactor.stream();
        assert_eq!(stream.push(b"x abcdef"), b"x ");
        assert_eq!(stream.push(b"g"), b"");
        assert_eq!(stream.push(b"!"), b"[redacted short]g!");
        assert_eq!(stream.finish(), b"");
    }

    #[test]
    fn nothing_is_held_back_without_reason_and_nothing_is_printed() {
        let redactor = redactor(&[("key", "hunter2hunter2"), ("empty", "")]);
        let mut stream = redactor.stream();
        assert_eq!(stream.push(b"hunter2hunter"), b"");
        assert_eq!(format!("{redactor:?} {stream:?}").matches("hunter2").count(), 0);
        assert_eq!(redactor.stream().push(b"a line\n"), b"a line\n");
        assert_eq!(self::redactor(&[]).stream().push(b"hunter2"), b"hunter2");
    }

    proptest! {
        /// However a stream is cut, what comes out is what the whole text would give.
        #[test]
        fn cuts_do_not_matter(
            secrets in prop::collection::vec("[ab%/+]{1,9}", 0..4),
            text in "[ab%/+=]{0,60}",
            plants in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..4),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let named: Vec<(&str, &str)> = secrets.iter().map(|secret| ("s", secret.as_str())).collect();
            let redactor = redactor(&named);
            let mut whole = text;
            for (what, place) in plants {
                if !secrets.is_empty() {
                    whole.insert_str(place.index(whole.len() + 1), what.get::<String>(&secrets));
                }
            }
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(whole.len() + 1)).collect();
            cuts.extend([0, whole.len()]);
            cuts.sort_unstable();
            let mut stream = redactor.stream();
            let mut out = Vec::new();
            for pair in cuts.windows(2) {
                out.extend(stream.push(&whole.as_bytes()[pair[0]..pair[1]]));
            }
            out.extend(stream.finish());
            prop_assert_eq!(String::from_utf8(out).unwrap(), redactor.text(&whole));
        }

        /// No raw secret is left in what goes out.
        #[test]
        fn no_secret_passes(secret in "[a-zA-Z0-9/+_-]{8,40}", before in "\\PC{0,20}", after in "\\PC{0,20}") {
            let redactor = redactor(&[("k", &secret)]);
            let out = redactor.text(&format!("{before}{secret}{after}"));
            prop_assert!(!out.contains(&secret));
        }
    }
}

//! Finds placeholders where they have no business. They are written so that a name, a URL and JSON carry them unchanged;
//! base64 is looked into as well, at each of its three alignments.

use aho_corasick::AhoCorasick;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;

use super::credential::Credential;

#[derive(Debug)]
pub(super) struct Leaks {
    finder: Option<AhoCorasick>,
    /// Names of credentials, by pattern.
    names: Vec<String>,
    longest: usize,
}

/// Looks through something that comes in pieces.
#[derive(Debug)]
pub(super) struct Search {
    tail: Vec<u8>,
    left: u64,
}

impl Leaks {
    pub fn new(credentials: &[Credential]) -> Self {
        let mut forms = Vec::new();
        let mut names = Vec::new();
        for one in credentials {
            let text = one.placeholder.as_bytes();
            let mut add = |form: Vec<u8>| {
                forms.push(form);
                names.push(one.name.clone());
            };
            add(text.to_vec());
            for front in 0..3 {
                let encoded = STANDARD_NO_PAD.encode([&vec![0; front][..], text].concat());
                // The first and last characters hold bits of what stands around.
                let from = [0, 2, 3][front];
                let until = (front + text.len()) * 8 / 6;
                add(encoded.as_bytes()[from..until].to_vec());
            }
        }
        let longest = forms.iter().map(Vec::len).max().unwrap_or(0);
        let finder = (!forms.is_empty()).then(|| {
            AhoCorasick::builder()
                .ascii_case_insensitive(true)
                .build(&forms)
                .expect("placeholders are few and short")
        });
        Self { finder, names, longest }
    }

    /// The name of a credential whose placeholder stands in `bytes`.
    pub fn find(&self, bytes: &[u8]) -> Option<&str> {
        self.find_other(bytes, None)
    }

    /// The same, of another credential than `own`.
    pub fn find_other(&self, bytes: &[u8], own: Option<&str>) -> Option<&str> {
        let finder = self.finder.as_ref()?;
        finder
            .find_iter(bytes)
            .map(|found| self.names[found.pattern().as_usize()].as_str())
            .find(|name| Some(*name) != own)
    }

    pub fn is_empty(&self) -> bool {
        self.finder.is_none()
    }

    /// Searches at most the first `window` bytes.
    pub fn search(&self, window: u64) -> Search {
        let left = if self.is_empty() { 0 } else { window };
        Search { tail: Vec::new(), left }
    }
}

impl Search {
    pub fn push<'a>(&mut self, leaks: &'a Leaks, piece: &[u8]) -> Option<&'a str> {
        if self.left == 0 {
            return None;
        }
        let piece = &piece[..piece.len().min(usize::try_from(self.left).unwrap_or(usize::MAX))];
        self.left -= piece.len() as u64;
        self.tail.extend_from_slice(piece);
        let found = leaks.find(&self.tail);
        self.tail.drain(..self.tail.len().saturating_sub(leaks.longest - 1));
        found
    }
}

//! Paths as rules see them. A path can be read in two ways, and servers differ: `%2F` as a slash or as a byte of a name. To be
//! allowed a path has to match in both readings; to be denied one is enough. A path that could climb (`..`, also encoded) or
//! that has no one reading is never allowed by a rule with paths, and always caught by a denial with paths.

use std::fmt;
use std::str::FromStr;

use globset::{GlobBuilder, GlobMatcher};
use serde::{Deserialize, Serialize};

/// The path of a request, without its query.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Path {
    readings: Option<Readings>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Readings {
    /// Escapes undone, but for those of separators.
    kept: String,
    /// All escapes undone.
    undone: String,
}

impl Path {
    /// Reads everything in front of `?`.
    pub fn of(target: &str) -> Self {
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        Self {
            readings: Readings::of(path),
        }
    }

    /// Whether it reads in no one way.
    pub fn is_ambiguous(&self) -> bool {
        self.readings.is_none()
    }
}

impl Readings {
    fn of(path: &str) -> Option<Self> {
        let (kept, undone) = (undo(path, Separators::Kept)?, undo(path, Separators::Undone)?);
        // What a second round of decoding would make of it must not climb either.
        let twice = undo(&undone, Separators::Undone).unwrap_or_else(|| undone.clone());
        let is_sound = |text: &str| {
            !text.contains(['\\', '\0'])
                && !text.chars().any(char::is_control)
                && !text.split('/').skip(1).any(|part| {
                    // Servers of the Java world cut at `;` before they look for dots.
                    matches!(part.split(';').next(), Some("." | ".."))
                })
                && !text.contains("//")
        };
        let sound = path.starts_with('/') && [&kept, &undone, &twice].into_iter().all(|text| is_sound(text));
        sound.then_some(Self { kept, undone })
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Separators {
    Kept,
    Undone,
}

/// Undoes percent escapes; nothing where one is broken or the bytes are no text.
fn undo(path: &str, separators: Separators) -> Option<String> {
    let mut out = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|b| char::from(b).to_digit(16));
        let value = (digit(bytes.next())? * 16 + digit(bytes.next())?) as u8;
        match value {
            b'/' | b'\\' | b'%' if separators == Separators::Kept => out.extend(format!("%{value:02X}").bytes()),
            other => out.push(other),
        }
    }
    String::from_utf8(out).ok()
}

/// `/a/b` that path, `/a/*/c` any one name between, `/a/**` all below `/a/`. A pattern that ends in `/` means all below it.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PathPattern {
    text: String,
    kept: GlobMatcher,
    undone: GlobMatcher,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BadPath {
    #[error("`{0}` does not begin with `/`, or could climb, or holds a broken escape")]
    Form(String),
    #[error("`{0}` is no pattern")]
    Glob(String, #[source] globset::Error),
}

impl PathPattern {
    /// For a rule that opens.
    pub fn allows(&self, path: &Path) -> bool {
        path.readings
            .as_ref()
            .is_some_and(|path| self.kept.is_match(&path.kept) && self.undone.is_match(&path.undone))
    }

    /// For a rule that closes.
    pub fn touches(&self, path: &Path) -> bool {
        path.readings
            .as_ref()
            .is_none_or(|path| self.kept.is_match(&path.kept) || self.undone.is_match(&path.undone))
    }

    /// The part in front of the first wildcard: the longer, the more specific.
    pub fn fixed(&self) -> usize {
        self.text.find(['*', '?', '[', '{']).unwrap_or(self.text.len())
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for PathPattern {
    type Err = BadPath;

    fn from_str(text: &str) -> Result<Self, BadPath> {
        // A question mark would be a query for the reader and a wildcard for the glob.
        let readings = match text.contains('?') {
            true => None,
            false => Readings::of(text),
        };
        let readings = readings.ok_or_else(|| BadPath::Form(text.to_owned()))?;
        let glob = |pattern: &str| {
            let all_below = if pattern.ends_with('/') { "**" } else { "" };
            GlobBuilder::new(&format!("{pattern}{all_below}"))
                .literal_separator(true)
                .backslash_escape(false)
                .build()
                .map(|glob| glob.compile_matcher())
                .map_err(|source| BadPath::Glob(text.to_owned(), source))
        };
        Ok(Self {
            kept: glob(&readings.kept)?,
            undone: glob(&readings.undone)?,
            text: text.to_owned(),
        })
    }
}

impl PartialEq for PathPattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl Eq for PathPattern {}

impl fmt::Debug for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.text, f)
    }
}

impl fmt::Display for PathPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl TryFrom<String> for PathPattern {
    type Error = BadPath;

    fn try_from(text: String) -> Result<Self, BadPath> {
        text.parse()
    }
}

impl From<PathPattern> for String {
    fn from(pattern: PathPattern) -> Self {
        pattern.text
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn allows(pattern: &str, path: &str) -> bool {
        pattern.parse::<PathPattern>().unwrap().allows(&Path::of(path))
    }

    #[test]
    fn wildcards_stay_within_their_part() {
        for (pattern, path) in [
            ("/a/b", "/a/b"),
            ("/a/b", "/a/b?q=../x"),
            ("/a/b", "/a/%62"),
            ("/repos/*/issues", "/repos/x/issues"),
            ("/repos/**", "/repos/x/y/z"),
            ("/simple/", "/simple/requests/"),
            ("/@scope%2fname", "/@scope%2Fname"),
            ("/**", "/"),
            ("/a b", "/a%20b"),
        ] {
            assert!(allows(pattern, path), "{pattern} {path}");
        }
        for (pattern, path) in [
            ("/a/b", "/a/b/"),
            ("/a/b", "/A/b"),
            ("/repos/*/issues", "/repos/x/y/issues"),
            ("/repos/*/issues", "/repos/x%2Fy/issues"),
            ("/a/*/c", "/a%2Fb%2Fc"),
            ("/repos/**", "/reposx/y"),
            ("/repos/**", "*"),
        ] {
            assert!(!allows(pattern, path), "{pattern} {path}");
        }
    }

    /// T7 (threat): one rule, many spellings of the same way up.
    #[test]
    fn no_path_climbs_out_of_an_allowed_one() {
        for path in [
            "/repos/../admin",
            "/repos/%2e%2e/admin",
            "/repos/%2E./admin",
            "/repos/..%2fadmin",
            "/repos/%252e%252e/admin",
            "/repos/..;x=1/admin",
            "/repos/a/..\\admin",
            "/repos/a%5c..%5cadmin",
            "/repos//admin",
            "/repos/%2fadmin",
            "/repos/a%00",
            "/repos/%zz",
            "/repos/%e4",
            "/repos/a%0d%0ab",
        ] {
            assert!(!allows("/repos/**", path), "{path}");
            assert!(
                "/admin".parse::<PathPattern>().unwrap().touches(&Path::of(path)),
                "{path}"
            );
        }
    }

    #[test]
    fn a_denial_needs_one_reading_alone() {
        let secret: PathPattern = "/files/secret".parse().unwrap();
        assert!(secret.touches(&Path::of("/files%2Fsecret")) && !secret.allows(&Path::of("/files%2Fsecret")));
        assert!(!secret.touches(&Path::of("/files/other")));
    }

    #[test]
    fn a_pattern_is_a_sound_path_itself() {
        for bad in ["", "a", "/a/../b", "/a//b", "/a?b", "/%", "/a\\b"] {
            assert_eq!(bad.parse::<PathPattern>(), Err(BadPath::Form(bad.to_owned())), "{bad}");
        }
        assert!(matches!("/a[".parse::<PathPattern>(), Err(BadPath::Glob(..))));
    }

    proptest! {
        #[test]
        fn what_is_allowed_below_a_path_begins_with_it(path in "/[a./%2eEfF5c;\\\\]{0,24}") {
            let below: PathPattern = "/a/**".parse().unwrap();
            let path = Path::of(&path);
            if below.allows(&path) {
                let readings = path.readings.unwrap();
                prop_assert!(readings.undone.starts_with("/a/") && !readings.undone.contains("/../"));
            }
        }
    }
}

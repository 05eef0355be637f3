//! What a label may be: a caller's own name and value, kept with a task or a sandbox and asked for in lists.

use std::collections::BTreeMap;

const MOST: usize = 64;
const KEY_BYTES: usize = 128;
const VALUE_BYTES: usize = 512;

/// Says what is wrong with a set of labels.
pub fn check(labels: &BTreeMap<String, String>) -> Result<(), String> {
    if labels.len() > MOST {
        return Err(format!("{} labels are more than {MOST}", labels.len()));
    }
    for (key, value) in labels {
        let shown = crate::ids::shown(key);
        if key.is_empty() || key.len() > KEY_BYTES || key.contains('=') {
            return Err(format!("label `{shown}`: a key has 1 to {KEY_BYTES} bytes and no `=`"));
        }
        if value.len() > VALUE_BYTES {
            return Err(format!("label `{shown}`: a value has at most {VALUE_BYTES} bytes"));
        }
        if key.chars().chain(value.chars()).any(char::is_control) {
            return Err(format!("label `{shown}`: there are control characters in it"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_few_short_and_plain() {
        let one = |key: &str, value: &str| check(&[(key.to_owned(), value.to_owned())].into());
        assert_eq!(one("team", "größe=1"), Ok(()));
        assert_eq!(one(&"k".repeat(128), &"v".repeat(512)), Ok(()));
        for (key, value) in [
            ("", "x".to_owned()),
            ("a=b", "x".to_owned()),
            (&"k".repeat(129), "x".to_owned()),
            ("k", "v".repeat(513)),
            ("k", "a\nb".to_owned()),
            ("k\u{1b}", "x".to_owned()),
        ] {
            assert!(one(key, &value).unwrap_err().starts_with("label `"), "{key} {value}");
        }
        let many = (0..65).map(|n| (n.to_string(), String::new())).collect();
        assert_eq!(check(&many), Err("65 labels are more than 64".to_owned()));
    }
}

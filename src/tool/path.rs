//! Paths as models write them.

use super::result::Draft;

/// Where relative paths start.
pub const WORKSPACE: &str = "/workspace";

/// The absolute form of `path`. `..` is left alone: what it means is the sandbox's to say, and it cannot lead out.
pub fn absolute(path: &str) -> Result<String, Box<Draft>> {
    if path.contains('\0') {
        let draft = Draft::error(
            "invalid_arguments",
            "a path cannot hold a NUL character",
            "give another path",
        );
        return Err(Box::new(draft));
    }
    let relative = path.trim_start_matches("./");
    Ok(match path {
        "" | "." | "./" => WORKSPACE.to_owned(),
        _ if path.starts_with('/') => path.to_owned(),
        _ => format!("{WORKSPACE}/{relative}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_start_at_the_workspace() {
        for (path, expected) in [
            (".", "/workspace"),
            ("a/b.txt", "/workspace/a/b.txt"),
            ("./a", "/workspace/a"),
            ("../etc", "/workspace/../etc"),
            ("/tmp/x", "/tmp/x"),
            ("-x y\n🦀", "/workspace/-x y\n🦀"),
        ] {
            assert_eq!(absolute(path).unwrap(), expected);
        }
        assert!(absolute("a\0b").is_err());
    }
}

//! A data directory, a project and scripts, and a way to call the program on them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::support::script::Script;
use crate::support::{EXUVIA, Scratch, has_sandboxes};

pub struct Desk {
    folder: Scratch,
}

/// What a call came to.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// The one object on the last line of stdout.
    pub fn json(&self) -> Value {
        let last = self.stdout.lines().last().unwrap_or_else(|| panic!("{self:?}"));
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Of a call that has to end with `code`, whatever it prints.
    pub fn ended_plain(&self, code: i32) {
        assert_eq!(self.code, code, "{self:?}");
    }

    /// As `json`, of a call that has to end with `code`.
    pub fn ended(&self, code: i32) -> Value {
        assert_eq!(self.code, code, "{self:?}");
        self.json()
    }
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self {
            code: output.status.code().expect("it was not killed"),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }
}

impl Desk {
    /// `None`, said on stderr, where no sandbox can be made.
    pub fn new(test: &str) -> Option<Self> {
        has_sandboxes(test).then(Self::bare)
    }

    /// For what needs no sandbox. The project is `greeting.txt` and `sub/code.py`.
    pub fn bare() -> Self {
        let folder = Scratch::new();
        let project = folder.path().join("project");
        fs::create_dir_all(project.join("sub")).unwrap();
        fs::write(project.join("greeting.txt"), "hello\n").unwrap();
        fs::write(project.join("sub/code.py"), "print(1)\n").unwrap();
        Self { folder }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn data(&self) -> PathBuf {
        self.path().join("data")
    }

    pub fn project(&self) -> PathBuf {
        self.path().join("project")
    }

    /// Writes a file and gives its path.
    pub fn file(&self, name: &str, text: &str) -> String {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// Writes a script and gives its model spec.
    pub fn script(&self, script: &Script) -> String {
        format!("scripted:{}", self.file("script.jsonl", &script.jsonl()))
    }

    /// A policy by its name, over `default`.
    pub fn policy(&self, name: &str, rest: &str) {
        let head = format!("format_version = 1\nname = \"{name}\"\n");
        self.file(&format!("data/policies/{name}.toml"), &(head + rest));
    }

    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(EXUVIA);
        command
            .args(words)
            .args(["--json", "--data-dir"])
            .arg(self.data())
            .env_remove("EXUVIA_MODEL")
            .env_remove("EXUVIA_SERVER")
            .env("USER", "grace")
            .env_remove("SUDO_USER")
            .current_dir(self.path())
            .stdin(Stdio::null());
        command
    }

    /// The program with nothing but these words.
    pub fn plain(&self, words: &[&str]) -> Command {
        let mut command = Command::new(EXUVIA);
        command
            .args(words)
            .env_remove("EXUVIA_MODEL")
            .env_remove("EXUVIA_SERVER")
            .env_remove("SUDO_USER")
            .env("EXUVIA_DATA_DIR", self.data())
            .env("USER", "grace")
            .current_dir(self.path())
            .stdin(Stdio::null());
        command
    }

    /// Calls the program and waits for its end.
    pub fn call(&self, words: &[&str]) -> Done {
        self.command(words).output().unwrap().into()
    }

    /// `exuvia run` on the project with a script.
    pub fn run(&self, script: &Script, more: &[&str]) -> Done {
        let (model, project) = (self.script(script), self.project());
        let words = [
            "run",
            "--prompt",
            "do it",
            "--model",
            &model,
            "--workspace",
            project.to_str().unwrap(),
        ];
        self.call(&[&words, more].concat())
    }

    /// The project's files and what is in them.
    pub fn files(&self) -> Vec<(String, String)> {
        fn walk(root: &Path, folder: &Path, files: &mut Vec<(String, String)>) {
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let path = entry.path();
                match path.is_dir() {
                    true => walk(root, &path, files),
                    false => {
                        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
                        files.push((name, fs::read_to_string(&path).unwrap()));
                    }
                }
            }
        }
        let mut files = Vec::new();
        walk(&self.project(), &self.project(), &mut files);
        files.sort();
        files
    }
}

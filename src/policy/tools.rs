//! The vocabulary of rules: the built-in tools and their arguments.
//!
//! Only names: what a tool does and how its arguments are checked is `tool`'s. A rule for a tool or an argument that is not
//! here is refused, so a typo can never become a rule that matches nothing.

/// A tool as rules see it.
#[derive(Debug, PartialEq, Eq)]
pub struct Tool {
    pub name: &'static str,
    /// The first one is what a bare `--arg` of `policy explain` means.
    pub arguments: &'static [Argument],
}

#[derive(Debug, PartialEq, Eq)]
pub struct Argument {
    pub name: &'static str,
    /// What the tool takes where the call names none.
    pub default: Option<&'static str>,
}

const fn argument(name: &'static str) -> Argument {
    Argument { name, default: None }
}

const fn or(name: &'static str, default: &'static str) -> Argument {
    Argument {
        name,
        default: Some(default),
    }
}

/// The workspace: where relative paths start.
pub const WORKSPACE: &str = "/workspace";

pub const ALL: &[Tool] = &[
    Tool {
        name: "shell",
        arguments: &[argument("command"), or("cwd", WORKSPACE), argument("timeout_s")],
    },
    Tool {
        name: "read_file",
        arguments: &[argument("path"), argument("offset"), argument("limit")],
    },
    Tool {
        name: "write_file",
        arguments: &[argument("path"), argument("content")],
    },
    Tool {
        name: "edit_file",
        arguments: &[
            argument("path"),
            argument("old"),
            argument("new"),
            or("replace_all", "false"),
        ],
    },
    Tool {
        name: "list_files",
        arguments: &[or("path", WORKSPACE), argument("depth")],
    },
    Tool {
        name: "search",
        arguments: &[argument("pattern"), or("path", WORKSPACE), argument("glob")],
    },
    Tool {
        name: "read_artifact",
        arguments: &[argument("artifact"), argument("offset"), argument("limit")],
    },
    Tool {
        name: "finish",
        arguments: &[argument("summary"), argument("result")],
    },
];

impl Tool {
    pub fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|tool| tool.name == name)
    }

    pub fn argument(&self, name: &str) -> Option<&'static Argument> {
        self.arguments.iter().find(|argument| argument.name == name)
    }
}

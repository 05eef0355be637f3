//! Which tools there are, what a model is told of them, and what they can touch.

use std::fmt;

use serde_json::Value;

use super::result::{Draft, brief};
use super::{
    Effect, ToolResult, arguments, edit_file, finish, list_files, read_artifact, read_file, search, shell, write_file,
};
use crate::model::ToolDefinition;

/// A tool of ours, in the order of the names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Builtin {
    EditFile,
    Finish,
    ListFiles,
    ReadArtifact,
    ReadFile,
    Search,
    Shell,
    WriteFile,
}

impl Builtin {
    pub const ALL: [Self; 8] = [
        Self::EditFile,
        Self::Finish,
        Self::ListFiles,
        Self::ReadArtifact,
        Self::ReadFile,
        Self::Search,
        Self::Shell,
        Self::WriteFile,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::EditFile => "edit_file",
            Self::Finish => "finish",
            Self::ListFiles => "list_files",
            Self::ReadArtifact => "read_artifact",
            Self::ReadFile => "read_file",
            Self::Search => "search",
            Self::Shell => "shell",
            Self::WriteFile => "write_file",
        }
    }

    pub fn by_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    pub fn effect(self) -> Effect {
        match self {
            Self::ListFiles | Self::ReadArtifact | Self::ReadFile | Self::Search => Effect::ReadOnly,
            Self::EditFile | Self::Shell | Self::WriteFile => Effect::Workspace,
            Self::Finish => Effect::Control,
        }
    }

    /// For the model; each says what to do when the call fails (H5).
    pub fn description(self) -> &'static str {
        match self {
            Self::EditFile => {
                "Replaces an exact piece of text in a file. `old` must occur exactly once, unless `replace_all` is true. \
                 On failure nothing is changed and the result tells the nearest lines: read the file again and copy `old` from it."
            }
            Self::Finish => {
                "Ends the task. `summary` says what was done; `result` is the answer, where the task asks for one. \
                 Call it alone, after checking the work; when a completion check then fails, go on working."
            }
            Self::ListFiles => {
                "Lists files and directories below `path` (default: the workspace), `depth` levels deep (default 2). \
                 If it is cut short, list a directory further down."
            }
            Self::ReadArtifact => {
                "Reads a stored output that was too long for a result: `limit` bytes from `offset` (default 0). \
                 Go on at `next_offset` until it is null."
            }
            Self::ReadFile => {
                "Reads a text file with line numbers: `limit` lines from line `offset` (default 1). \
                 For a long file read a part; if the path does not exist, use `list_files` or `search`."
            }
            Self::Search => {
                "Finds lines that match a regular expression in the files below `path` (default: the workspace) whose path fits \
                 `glob`, such as `**/*.py`. If there are too many matches, narrow the pattern or the glob."
            }
            Self::Shell => {
                "Runs a command with `sh -c` in the sandbox and returns its exit code, stdout and stderr. It gets no input. \
                 The command and all its children are killed after `timeout_s` seconds; a failing command is a result, so read \
                 its stderr and try something else."
            }
            Self::WriteFile => {
                "Writes a whole file; missing directories are made, an existing file is replaced. \
                 To change a part of a file use `edit_file`."
            }
        }
    }

    /// Whether `text` fits the schema.
    pub fn check(self, text: &str) -> Result<(), Box<Draft>> {
        let name = self.name();
        match self {
            Self::EditFile => arguments::parse::<edit_file::Arguments>(name, text).map(drop),
            Self::Finish => arguments::parse::<finish::Arguments>(name, text).map(drop),
            Self::ListFiles => arguments::parse::<list_files::Arguments>(name, text).map(drop),
            Self::ReadArtifact => arguments::parse::<read_artifact::Arguments>(name, text).map(drop),
            Self::ReadFile => arguments::parse::<read_file::Arguments>(name, text).map(drop),
            Self::Search => arguments::parse::<search::Arguments>(name, text).map(drop),
            Self::Shell => arguments::parse::<shell::Arguments>(name, text).map(drop),
            Self::WriteFile => arguments::parse::<write_file::Arguments>(name, text).map(drop),
        }
    }

    /// JSON Schema of the arguments; unknown ones are refused.
    pub fn schema(self) -> Value {
        match self {
            Self::EditFile => arguments::schema::<edit_file::Arguments>(),
            Self::Finish => arguments::schema::<finish::Arguments>(),
            Self::ListFiles => arguments::schema::<list_files::Arguments>(),
            Self::ReadArtifact => arguments::schema::<read_artifact::Arguments>(),
            Self::ReadFile => arguments::schema::<read_file::Arguments>(),
            Self::Search => arguments::schema::<search::Arguments>(),
            Self::Shell => arguments::schema::<shell::Arguments>(),
            Self::WriteFile => arguments::schema::<write_file::Arguments>(),
        }
    }
}

impl fmt::Display for Builtin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The tools that one run has (H6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registry {
    /// Sorted by name, no tool twice.
    tools: Vec<Builtin>,
}

impl Registry {
    pub fn all() -> Self {
        Self::of(Builtin::ALL)
    }

    /// Only these.
    pub fn of(tools: impl IntoIterator<Item = Builtin>) -> Self {
        let mut tools: Vec<Builtin> = tools.into_iter().collect();
        tools.sort();
        tools.dedup();
        Self { tools }
    }

    /// What the model is told: sorted by name, the same bytes each time.
    pub fn definitions(&self) -> Vec<ToolDefinition> {
        let define = |tool: &Builtin| ToolDefinition {
            name: tool.name().to_owned(),
            description: tool.description().to_owned(),
            parameters: tool.schema(),
        };
        self.tools.iter().map(define).collect()
    }

    /// The tool `name`, or the result that says that there is none (H1).
    pub fn find(&self, name: &str) -> Result<Builtin, Box<Draft>> {
        let found = self.tools.iter().find(|tool| tool.name() == name);
        found.copied().ok_or_else(|| Box::new(self.unknown(name)))
    }

    /// Whether a call can be made at all: the tool, or the result that says what is wrong with the name or the arguments.
    /// Pure, so that nobody is asked to approve a call that cannot run.
    pub fn check(&self, name: &str, arguments: &str) -> Result<Builtin, Box<ToolResult>> {
        let checked = self.find(name).and_then(|tool| tool.check(arguments).map(|()| tool));
        checked.map_err(|draft| Box::new(draft.short()))
    }

    fn unknown(&self, name: &str) -> Draft {
        let names: Vec<&str> = self.tools.iter().map(|tool| tool.name()).collect();
        let suggestion = match similar::get_close_matches(name, &names, 1, 0.5).first() {
            Some(nearest) => format!("did you mean `{nearest}`?"),
            None => "use one of `data.tools`".to_owned(),
        };
        Draft::error(
            "unknown_tool",
            format!("there is no tool `{}`", brief(name)),
            suggestion,
        )
        .with("tools", names)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn definitions_are_sorted_strict_and_stable() {
        let definitions = Registry::all().definitions();
        let names: Vec<&str> = definitions.iter().map(|definition| definition.name.as_str()).collect();
        let mut sorted = names.clone();
        sorted.sort_unstable();
        assert_eq!(names, sorted);
        for definition in &definitions {
            assert_eq!(
                definition.parameters["additionalProperties"], false,
                "{}",
                definition.name
            );
            assert_eq!(definition.parameters["type"], "object", "{}", definition.name);
        }
        insta::assert_json_snapshot!(definitions);
    }

    #[test]
    fn names_lead_to_tools_and_only_to_those_that_a_run_has() {
        for tool in Builtin::ALL {
            assert_eq!(Builtin::by_name(tool.name()), Some(tool));
        }
        let few = Registry::of([Builtin::Shell, Builtin::Finish, Builtin::Shell]);
        assert_eq!(few.find("shell"), Ok(Builtin::Shell));
        let unknown = few.find("read_file").unwrap_err();
        assert_eq!(unknown.data["tools"], serde_json::json!(["finish", "shell"]));
        assert_eq!(few.definitions().len(), 2);
    }

    #[test]
    fn h1_a_call_that_cannot_run_is_found_before_anyone_is_asked() {
        let few = Registry::of([Builtin::Shell]);
        assert_eq!(few.check("shell", r#"{"command": "ls"}"#), Ok(Builtin::Shell));
        let kind = |name: &str, text: &str| few.check(name, text).unwrap_err().error.unwrap().r#type;
        assert_eq!(kind("shell", r#"{"command": ""}"#), "invalid_arguments");
        assert_eq!(kind("finish", r#"{"summary": "x"}"#), "unknown_tool");
        for tool in Builtin::ALL {
            let told = tool.check("{\"no such\": 1}").unwrap_err().data["problems"].to_string();
            assert!(told.contains("an unknown argument"), "{told}");
        }
    }
}

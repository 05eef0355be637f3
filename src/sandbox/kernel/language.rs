//! The languages, and how the sandbox is asked for them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use super::Error;
use crate::sandbox::{self, Command, Sandbox};

/// How long an interpreter may take to say its version.
const PROBE: Duration = Duration::from_secs(20);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Language {
    Python,
    Bash,
    Node,
}

/// The signals that interrupt code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Interrupts {
    pub first: i32,
    /// Said when the code still runs after this time, and from then on again and again.
    pub then: Option<(Duration, i32)>,
}

/// Text that names no language.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is no language of a kernel: use `python`, `bash` or `node`")]
pub struct UnknownLanguage(String);

impl FromStr for Language {
    type Err = UnknownLanguage;

    fn from_str(text: &str) -> Result<Self, UnknownLanguage> {
        match text {
            "python" | "python3" => Ok(Self::Python),
            "bash" => Ok(Self::Bash),
            "node" | "javascript" | "js" => Ok(Self::Node),
            _ => Err(UnknownLanguage(text.to_owned())),
        }
    }
}

impl fmt::Display for Language {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Python => "python",
            Self::Bash => "bash",
            Self::Node => "node",
        })
    }
}

/// What a driver is to do with its process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Piece after piece, state kept.
    Kernel,
    /// One piece, then the process ends with its status.
    Once,
    /// Forks one child ahead for each piece. Python only.
    Zygote,
    /// Is taken for a mould. Python only.
    Nursery,
    /// Cast from a mould: one piece, then the process ends. It says its end itself.
    Cast,
}

/// An interpreter that the sandbox has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interpreter {
    pub program: &'static str,
    pub version: String,
}

impl Language {
    pub const ALL: [Self; 3] = [Self::Python, Self::Bash, Self::Node];

    /// Names of its interpreter, in the order they are tried.
    pub(super) fn programs(self) -> &'static [&'static str] {
        match self {
            Self::Python => &["python3", "python"],
            Self::Bash => &["bash"],
            Self::Node => &["node", "nodejs"],
        }
    }

    /// Asks the sandbox whether it has this language.
    ///
    /// # Errors
    /// [`Error::NoInterpreter`] when it has not.
    pub async fn find(self, sandbox: &Sandbox) -> Result<Interpreter, Error> {
        for program in self.programs() {
            let command = Command::new([*program, "--version"]).timeout(PROBE);
            match sandbox.run(command, 4096).await {
                Ok(finished) if finished.ended.is_success() => {
                    let text = finished.stdout.text();
                    let version = text.lines().next().unwrap_or_default().trim().to_owned();
                    return Ok(Interpreter { program, version });
                }
                Ok(finished) => {
                    return Err(Error::Unfit {
                        language: self,
                        reason: format!("`{program} --version`: {:?}", finished.ended.cause),
                    });
                }
                Err(error) if is_missing(&error) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(self.missing())
    }

    pub(super) fn missing(self) -> Error {
        let tried: Vec<String> = self.programs().iter().map(|name| format!("`{name}`")).collect();
        Error::NoInterpreter {
            language: self,
            tried: tried.join(", "),
        }
    }

    /// What interrupts its code.
    ///
    /// Node changes the owner of SIGINT when a cell begins to wait; a SIGINT in that moment goes unseen, or kills. So a signal comes
    /// first that a cell which waits takes and everything else ignores, and SIGINT only for code that still runs then. A program that
    /// Bash has forked and not yet executed takes no notice of SIGINT, and Bash waits for it.
    pub(super) fn interrupts(self) -> Interrupts {
        match self {
            Self::Python => Interrupts {
                first: libc::SIGINT,
                then: None,
            },
            Self::Bash => Interrupts {
                first: libc::SIGINT,
                then: Some((Duration::from_millis(500), libc::SIGINT)),
            },
            Self::Node => Interrupts {
                first: libc::SIGURG,
                then: Some((Duration::from_millis(50), libc::SIGINT)),
            },
        }
    }

    /// The words that start its driver, and what the driver reads first.
    pub(super) fn start(self, program: &str, mark: &str, mode: Mode) -> (Vec<Vec<u8>>, Vec<u8>) {
        let (mode, python) = match mode {
            Mode::Kernel => (
                "kernel",
                concat!(
                    include_str!("kernels/python.py"),
                    include_str!("kernels/python_kernel.py")
                ),
            ),
            Mode::Once => (
                "once",
                concat!(
                    include_str!("kernels/python.py"),
                    include_str!("kernels/python_piece.py"),
                    include_str!("kernels/python_once.py")
                ),
            ),
            Mode::Zygote => (
                "zygote",
                concat!(
                    include_str!("kernels/python.py"),
                    include_str!("kernels/python_piece.py"),
                    include_str!("kernels/python_zygote.py")
                ),
            ),
            Mode::Nursery => (
                "nursery",
                concat!(
                    include_str!("kernels/python.py"),
                    include_str!("kernels/python_piece.py"),
                    include_str!("kernels/python_once.py"),
                    include_str!("kernels/python_nursery.py")
                ),
            ),
            // All of it is in the mould.
            Mode::Cast => ("cast", ""),
        };
        // By standard input, where the interpreter can take it so: a command line is seen by everything in the sandbox.
        let (words, driver): (&[&str], &str) = match self {
            Self::Python => (&[program, "-c", include_str!("kernels/python_start.py")], python),
            Self::Node => (
                &[program, "-e", include_str!("kernels/node_start.js")],
                include_str!("kernels/node.js"),
            ),
            Self::Bash => {
                let driver = include_str!("kernels/bash.sh");
                let words = [program, "--norc", "--noprofile", "-c", driver, program, mark, mode];
                return (words.map(|word| word.as_bytes().to_vec()).to_vec(), Vec::new());
            }
        };
        let words = words.iter().map(|word| word.as_bytes().to_vec()).collect();
        (words, format!("{} {mark} {mode}\n{driver}", driver.len()).into_bytes())
    }
}

/// Whether a command did not start because there is no such program.
pub(super) fn is_missing(error: &sandbox::Error) -> bool {
    matches!(error, sandbox::Error::NotStarted { code, .. } if code == "program_not_found")
}

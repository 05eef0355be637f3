//! `exuvia doctor`: what this host can enforce, each gap with what to do about it.
//!
//! Exit 0 when the default policy can be enforced, 1 when not. Looks and tries: it makes one sandbox and removes it, and the
//! data directory where there is none. The checks are in `checks`, `disks` and `strays`, the host's sysctls in `sysctls`.

mod checks;
mod disks;
mod strays;
mod sysctls;

use serde::Serialize;

use super::{Context, Error, Exit};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// End what dead servers left on this host: sandboxes, containers, working directories with their mounts; of this data
    /// directory, but for what its next server goes on with, and of those that are gone.
    #[arg(long)]
    fix: bool,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Finding {
    name: &'static str,
    state: State,
    /// What was found.
    detail: String,
    /// What to do about it; empty where nothing is to be done.
    #[serde(skip_serializing_if = "String::is_empty")]
    remedy: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    Ok,
    /// Not there, and nothing by default needs it.
    Absent,
    /// The wall stands without it, but is thinner than it could be.
    Weak,
    /// The default policy cannot be enforced.
    Missing,
}

impl State {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Absent => "-",
            Self::Weak => "weak",
            Self::Missing => "MISSING",
        }
    }
}

impl Finding {
    fn new(name: &'static str, state: State, detail: impl Into<String>, remedy: &str) -> Self {
        // Where all is well there is nothing to do.
        let remedy = if state == State::Ok {
            String::new()
        } else {
            remedy.to_owned()
        };
        Self {
            name,
            state,
            detail: detail.into(),
            remedy,
        }
    }
}

/// All that was looked at.
#[derive(Debug)]
struct Report {
    /// The proof of `needed`: a sandbox that was really made.
    sandbox: Finding,
    /// What a sandbox stands on.
    needed: Vec<Finding>,
    /// What other backends and stronger isolation would need.
    more: Vec<Finding>,
    /// The host's sysctls and their like.
    switches: Vec<Finding>,
}

pub async fn run(args: Args, context: &Context) -> Result<Exit, Error> {
    let mut needed = checks::host();
    needed.extend([
        disks::quota(&context.data_dir),
        disks::overlays(&context.data_dir),
        strays::look(&context.data_dir, args.fix).await,
    ]);
    let report = Report {
        sandbox: checks::sandbox(&context.data_dir).await,
        needed,
        more: [disks::kinds(&context.data_dir), checks::more(&context.data_dir).await].concat(),
        switches: sysctls::all(),
    };
    let able = report.is_able();
    let findings: Vec<&Finding> = report.all().collect();
    let object = serde_json::json!({ "able": able, "findings": findings });
    context.finish(&object, &report.text());
    Ok(if able { Exit::Ok } else { Exit::Failed })
}

impl Report {
    fn all(&self) -> impl Iterator<Item = &Finding> {
        let rest = self.needed.iter().chain(&self.more).chain(&self.switches);
        std::iter::once(&self.sandbox).chain(rest)
    }

    /// Whether the default policy can be enforced.
    fn is_able(&self) -> bool {
        self.all().all(|finding| finding.state != State::Missing)
    }

    /// The verdict first, then what is there in a few words, then each gap with what to do about it.
    fn text(&self) -> String {
        let (able, sandbox) = (self.is_able(), &self.sandbox);
        let mut text = match able {
            true => format!("Sandboxes work here: {}.\n\n", sandbox.detail),
            false => "Sandboxes do NOT work here: see what is MISSING.\n\n".to_owned(),
        };
        if !able {
            text += &line(sandbox);
        }
        text += &in_short("ok", &self.needed);
        self.needed
            .iter()
            .filter(|finding| finding.state != State::Ok)
            .for_each(|gap| text += &line(gap));
        text += "\nFor policies that ask for them:\n";
        self.more.iter().for_each(|finding| text += &line(finding));
        text += "\nSwitches of this host. The wall stands without them and is thicker with them:\n";
        text += &in_short("ok", &self.switches);
        let weak: Vec<&Finding> = self
            .switches
            .iter()
            .filter(|finding| finding.state != State::Ok)
            .collect();
        weak.into_iter().for_each(|finding| text += &line(finding));
        text
    }
}

/// One finding: two lines where something is to be done about it.
fn line(finding: &Finding) -> String {
    let mut line = format!("  {:8} {:24} {}\n", finding.state.word(), finding.name, finding.detail);
    if !finding.remedy.is_empty() {
        line += &format!("  {:33} -> {}\n", "", finding.remedy);
    }
    line
}

/// The names of all that is well, wrapped.
fn in_short(word: &str, findings: &[Finding]) -> String {
    const WIDTH: usize = 100;
    let mut lines = vec![format!("  {word:8}")];
    for finding in findings.iter().filter(|finding| finding.state == State::Ok) {
        let last = lines.last_mut().expect("there is a first line");
        let separator = if last.trim() == word || last.trim().is_empty() {
            " "
        } else {
            ", "
        };
        if last.len() + separator.len() + finding.name.len() > WIDTH {
            last.push(',');
            lines.push(format!("{:10} {}", "", finding.name));
        } else {
            last.push_str(separator);
            last.push_str(finding.name);
        }
    }
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(name: &'static str, state: State) -> Finding {
        Finding::new(name, state, "found", "do this")
    }

    fn report(sandbox: State) -> Report {
        Report {
            sandbox: finding("sandbox", sandbox),
            needed: ["root", "tmpfs"].map(|name| finding(name, State::Ok)).into(),
            more: vec![finding("KVM", State::Absent)],
            switches: vec![finding("a", State::Ok), finding("b", State::Weak)],
        }
    }

    #[test]
    fn the_verdict_comes_first_and_a_gap_has_its_remedy() {
        let shown = report(State::Ok).text();
        let lines: Vec<&str> = shown.lines().collect();
        assert_eq!(
            &lines[..3],
            ["Sandboxes work here: found.", "", "  ok       root, tmpfs"]
        );
        assert_eq!(shown.matches("-> do this").count(), 2, "{shown}");
    }

    #[test]
    fn one_missing_piece_is_enough() {
        let report = report(State::Missing);
        assert!(!report.is_able());
        let shown = report.text();
        assert!(shown.starts_with("Sandboxes do NOT work here"), "{shown}");
        assert!(shown.contains("  MISSING  sandbox                  found\n"), "{shown}");
    }

    #[test]
    fn names_wrap() {
        let many: Vec<Finding> = (0..30).map(|_| finding("twelve chars", State::Ok)).collect();
        let shown = in_short("ok", &many);
        assert!(
            shown.lines().count() > 3 && shown.lines().all(|line| line.len() <= 101),
            "{shown}"
        );
        assert_eq!(shown.matches("twelve chars").count(), 30);
    }
}

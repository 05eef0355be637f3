//! How far it is, on stderr: one changing line on a terminal, a line for each step elsewhere.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use indicatif::ProgressBar;

use super::show;
use crate::cli::progress::spinner;
use crate::cli::report::clean_line;
use crate::sandbox::image::Progress;

/// Clones show the same.
#[derive(Debug, Clone)]
pub(super) struct Shown {
    spinner: Option<ProgressBar>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Of each layer, bytes there are of how many.
    fetched: BTreeMap<usize, (u64, u64)>,
    last: String,
}

impl Shown {
    pub fn new() -> Self {
        Self {
            spinner: spinner(),
            state: Arc::default(),
        }
    }

    pub fn tell(&self, progress: &Progress) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Progress::Said(line) = progress {
            // What a builder says is there to be read afterwards, too.
            return match &self.spinner {
                Some(spinner) => spinner.println(clean_line(line)),
                None => err!("{}", clean_line(line)),
            };
        }
        let line = state.line(progress, self.spinner.is_some());
        match (&self.spinner, line) {
            (Some(spinner), Some(line)) => spinner.set_message(line),
            (None, Some(line)) if line != state.last => {
                err!("{line}");
                state.last = line;
            }
            (_, None) | (None, Some(_)) => {}
        }
    }

    /// Takes the line off the terminal.
    pub fn done(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.finish_and_clear();
        }
    }
}

impl State {
    /// What is to be said, if anything; bytes only where the line can change.
    fn line(&mut self, progress: &Progress, changes: bool) -> Option<String> {
        match progress {
            Progress::Said(line) => Some(clean_line(line)),
            Progress::Waiting => Some("waiting for another import of the same image".to_owned()),
            Progress::Retrying { what, why } => Some(clean_line(&format!("trying {what} again: {why}"))),
            Progress::Unpacking { layer, layers } => Some(format!("unpacking layer {layer} of {layers}")),
            Progress::Fetching {
                layer,
                layers,
                bytes,
                of,
            } => {
                self.fetched.insert(*layer, (*bytes, *of));
                if changes {
                    let (bytes, of) = self
                        .fetched
                        .values()
                        .fold((0, 0), |(a, b), (bytes, of)| (a + bytes, b + of));
                    let (bytes, of) = (show::size(bytes), show::size(of));
                    return Some(format!("fetching {layers} layers: {bytes} of {of} so far"));
                }
                (bytes == of).then(|| format!("fetched layer {layer} of {layers}, {}", show::size(*of)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_a_line_for_each_layer_and_a_terminal_gets_bytes() {
        let step = |bytes| Progress::Fetching {
            layer: 2,
            layers: 3,
            bytes,
            of: 2048,
        };
        let mut state = State::default();
        assert_eq!(state.line(&step(1024), false), None);
        assert_eq!(state.line(&step(2048), false).unwrap(), "fetched layer 2 of 3, 2.0 KiB");
        assert_eq!(
            state.line(&step(1024), true).unwrap(),
            "fetching 3 layers: 1.0 KiB of 2.0 KiB so far"
        );
        let sly = Progress::Retrying {
            what: "x".to_owned(),
            why: "\u{1b}[2Jgone".to_owned(),
        };
        assert!(!state.line(&sly, false).unwrap().contains('\u{1b}'));
    }
}

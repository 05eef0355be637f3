//! What a run came to, and what must hold for each.

use std::collections::{BTreeMap, BTreeSet};

use super::{Sim, now};
use crate::model::Message;
use crate::run::event::{Event, Outcome};
use crate::run::session::Session;
use crate::run::{agree, fold};
use crate::store::Store;
use crate::tool::Effect as ToolEffect;
use crate::workspace::TreeId;

/// What a run came to.
#[derive(Debug, PartialEq)]
pub(super) struct End {
    outcome: Outcome,
    tree: TreeId,
    messages: Vec<Message>,
    steps: u32,
}

impl Sim {
    pub(super) fn ended(&self) -> Option<End> {
        now(self.store.run(&self.run)).unwrap().is_terminal.then_some(())?;
        let entries = self.entries();
        let state = fold(&self.run, &entries).unwrap();
        agree(
            &self.run,
            &entries,
            &now(self.store.checkpoint(&self.run, None)).unwrap(),
        )
        .unwrap();
        let Some(Event::Ended { outcome }) = entries.last().map(|entry| entry.event.clone()) else {
            panic!("the last entry is not the end");
        };
        Some(End {
            outcome,
            tree: state.workspace.tree,
            messages: Session::of(&entries).messages(),
            steps: state.used.steps,
        })
    }

    /// LOST_0, DOUBLED_0, FLAGGED.
    pub(super) fn check(&self) {
        let entries = self.entries();
        let session = Session::of(&entries);
        let mut asked: BTreeMap<u32, u32> = BTreeMap::new();
        let mut done = BTreeSet::new();
        for entry in &entries {
            match &entry.event {
                Event::ToolFinished { step, .. } => assert!(done.insert(*step), "step {step} has two outcomes"),
                Event::OutcomeUnknown { step, .. } | Event::NotDone { step, .. } => {
                    *asked.entry(*step).or_default() += 1
                }
                _ => {}
            }
        }
        for step in &done {
            let key = self.rules.key(*step);
            let happened = match session.call(*step).unwrap().effect {
                ToolEffect::Idempotent => self.outside.keyed.contains_key(&key),
                ToolEffect::External => self.outside.unkeyed.contains_key(&key),
                ToolEffect::ReadOnly | ToolEffect::Workspace | ToolEffect::Control => true,
            };
            assert!(happened, "LOST_0: step {step} is called done");
        }
        assert!(self.outside.keyed.values().all(|times| *times == 1), "DOUBLED_0");
        for (key, times) in &self.outside.unkeyed {
            let step: u32 = key.rsplit_once('/').unwrap().1.parse().unwrap();
            let flags = asked.get(&step).copied().unwrap_or_default();
            assert!(
                *times <= 1 + flags,
                "FLAGGED: {key} happened {times} times, asked {flags} times"
            );
        }
    }
}

//! What happens when something that was begun happens: an answer, an effect, a look outside.

use std::time::Duration;

use super::Sim;
use super::plan::TOOLS;
use crate::run::decide;
use crate::run::event::Event;
use crate::run::state::Effect;
use crate::tool::{Effect as ToolEffect, ToolResult};
use crate::workspace::{Revision, TreeId};

impl Sim {
    /// Something that was begun happens; nobody has heard of it yet.
    pub(super) fn happen(&mut self, which: usize) {
        let Some(worker) = self.workers.get(which) else { return };
        let silent: Vec<usize> = (0..worker.going.len())
            .filter(|n| worker.going[*n].told.is_none())
            .collect();
        if silent.is_empty() {
            return;
        }
        let nth = silent[self.dice.roll(silent.len() as u64) as usize];
        let told = match worker.going[nth].effect.clone() {
            Effect::CallModel { step, attempt, .. } => {
                let mut reply = self.plan.answer(&worker.session);
                let asked = std::mem::take(&mut reply.message.tool_calls);
                let mut calls = self.rules.number(step, asked, &worker.session.messages());
                for call in &mut calls {
                    let class = TOOLS.iter().find(|(name, _)| *name == call.tool);
                    call.effect = class.map_or(call.effect, |(_, effect)| *effect);
                }
                Event::ModelReplied {
                    step,
                    attempt,
                    reply,
                    calls,
                    duration: Duration::ZERO,
                    cost_micros: Some(0),
                }
            }
            Effect::RunTool { step, attempt } => {
                let (class, key) = (worker.session.call(step).unwrap().effect, self.rules.key(step));
                let workspace = worker.state.workspace;
                let workspace = match class {
                    ToolEffect::ReadOnly | ToolEffect::Control => workspace,
                    ToolEffect::Workspace => grown(workspace, &key),
                    ToolEffect::Idempotent => {
                        // The other side knows the key.
                        self.outside.keyed.entry(key.clone()).or_insert(1);
                        grown(workspace, &key)
                    }
                    ToolEffect::External => {
                        *self.outside.unkeyed.entry(key.clone()).or_default() += 1;
                        grown(workspace, &key)
                    }
                };
                finished(step, attempt, workspace)
            }
            Effect::Probe { step, attempt } => {
                let key = self.rules.key(step);
                let happened = self.outside.unkeyed.contains_key(&key);
                match (step % 3, happened) {
                    // The tool has a status check, and it is sure.
                    (0, true) => finished(step, attempt, grown(worker.state.workspace, &key)),
                    (0, false) => Event::NotDone { step, attempt },
                    _ => decide::unknown(self.rules, &worker.state, &worker.session, step, attempt).unwrap(),
                }
            }
            effect @ (Effect::RunCheck { .. } | Effect::Decide { .. } | Effect::Start { .. } | Effect::End { .. }) => {
                panic!("{effect:?} is not begun here")
            }
        };
        self.workers[which].going[nth].told = Some(told);
    }
}

/// The workspace after that step: what came before and what was done, in order.
fn grown(before: Revision, key: &str) -> Revision {
    let mut hasher = blake3::Hasher::new();
    hasher.update(before.tree.to_string().as_bytes());
    hasher.update(key.as_bytes());
    TreeId::from_bytes(*hasher.finalize().as_bytes()).into()
}

fn finished(step: u32, attempt: u32, workspace: Revision) -> Event {
    Event::ToolFinished {
        step,
        attempt,
        result: ToolResult::ok(format!("did step {step}"), serde_json::Value::Null),
        workspace,
        duration: Duration::ZERO,
    }
}

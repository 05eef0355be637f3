//! What a seed draws: numbers, and what the model will do.

use serde_json::json;

use crate::model::{Assistant, Finish, Message, Reply, ToolCall, Usage};
use crate::run::session::Session;
use crate::tool::Effect as ToolEffect;

/// Splitmix64 (Steele, Lea, Flood 2014): a stream of numbers from a seed.
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % sides
    }
}

/// The tools of a plan: one of each class, and one whose effect can be looked up afterwards.
pub(super) const TOOLS: [(&str, ToolEffect); 5] = [
    ("list_files", ToolEffect::ReadOnly),
    ("read_artifact", ToolEffect::ReadOnly),
    ("write_file", ToolEffect::Workspace),
    ("edit_file", ToolEffect::Idempotent),
    ("shell", ToolEffect::External),
];

pub(super) fn arguments(tool: &str, n: usize) -> String {
    match tool {
        "list_files" => json!({ "path": format!("d{n}") }),
        "read_artifact" => json!({ "artifact": format!("a{n}") }),
        "write_file" => json!({ "path": format!("f{n}"), "content": "x" }),
        "edit_file" => json!({ "path": format!("f{n}"), "old": "x", "new": "y" }),
        "shell" => json!({ "command": format!("send {n}") }),
        other => panic!("{other}"),
    }
    .to_string()
}

/// What the model will do, turn by turn.
pub(super) struct Plan(pub(super) Vec<Vec<ToolCall>>);

impl Plan {
    pub(super) fn draw(dice: &mut Dice) -> Self {
        // Half of the plans are without calls that only a person can settle: those must come to the same in every word.
        let tools = if dice.roll(2) == 0 { 4 } else { 5 };
        let mut n = 0;
        let mut turn = |dice: &mut Dice| {
            (0..=dice.roll(4))
                .map(|_| {
                    n += 1;
                    let name = TOOLS[dice.roll(tools) as usize].0.to_owned();
                    let arguments = arguments(&name, n);
                    let id = format!("c{n}");
                    ToolCall { id, name, arguments }
                })
                .collect()
        };
        let turns = 1 + dice.roll(4);
        let mut turns: Vec<Vec<ToolCall>> = (0..turns).map(|_| turn(dice)).collect();
        turns.push(vec![ToolCall {
            id: "end".into(),
            name: "finish".into(),
            arguments: json!({ "summary": "done" }).to_string(),
        }]);
        Self(turns)
    }

    /// By the conversation alone, as a scripted model answers.
    pub(super) fn answer(&self, session: &Session) -> Reply {
        let said = session.messages();
        let turn = said
            .iter()
            .filter(|message| matches!(message, Message::Assistant(_)))
            .count();
        Reply {
            message: Assistant {
                tool_calls: self.0[turn].clone(),
                ..Assistant::default()
            },
            finish: Finish::ToolCalls,
            usage: Usage::default(),
            model: "sim".into(),
        }
    }
}

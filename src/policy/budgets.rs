//! What a run may use up, and how a task narrows that.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::quantity::{optional_duration, show_duration, show_usd};
use super::violation::Violation;

/// What a run may use up; reaching one is EXHAUSTED (requirements A4, B7, D1). `None` = no limit.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Budgets {
    /// Model calls and tool calls together.
    pub steps: Option<u32>,
    pub model_calls: Option<u32>,
    /// One model call or one tool call.
    pub step_time: Duration,
    /// The whole run, without the time in which it waited for a person.
    pub total_time: Duration,
    /// Input and output tokens together.
    pub tokens: Option<u64>,
    /// Millionths of a US dollar. Needs a price for the model.
    pub cost_micros: Option<u64>,
    /// Tool calls of one turn that may run side by side.
    pub parallel_tools: u32,
}

impl Default for Budgets {
    /// For background jobs (requirement D9): 100 steps, an hour.
    fn default() -> Self {
        Self {
            steps: Some(100),
            model_calls: None,
            step_time: Duration::from_secs(120),
            total_time: Duration::from_secs(3600),
            tokens: None,
            cost_micros: None,
            parallel_tools: 4,
        }
    }
}

/// What a task asks for within its policy; `None` = as the policy says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BudgetOverrides {
    pub steps: Option<u32>,
    pub model_calls: Option<u32>,
    #[serde(with = "optional_duration")]
    pub step_time: Option<Duration>,
    #[serde(with = "optional_duration")]
    pub total_time: Option<Duration>,
    pub tokens: Option<u64>,
    pub cost_micros: Option<u64>,
    pub parallel_tools: Option<u32>,
}

/// One override that is no narrowing.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The field as written in a file.
    pub field: &'static str,
    pub message: String,
}

impl Budgets {
    /// All overrides that are no larger than here, and a refusal for each that is. `owner` is the policy's name.
    pub(super) fn narrowed(&self, by: &BudgetOverrides, owner: &str) -> (Self, Vec<Refusal>) {
        let mut narrowing = Narrowing {
            owner,
            refusals: Vec::new(),
        };
        let budgets = Self {
            steps: narrowing.optional("steps", by.steps, self.steps, |n| n.to_string()),
            model_calls: narrowing.optional("model_calls", by.model_calls, self.model_calls, |n| n.to_string()),
            step_time: narrowing.always("step_time", by.step_time, self.step_time, show_duration),
            total_time: narrowing.always("total_time", by.total_time, self.total_time, show_duration),
            tokens: narrowing.optional("tokens", by.tokens, self.tokens, |n| n.to_string()),
            cost_micros: narrowing.optional("cost_usd", by.cost_micros, self.cost_micros, show_usd),
            parallel_tools: narrowing.always("parallel_tools", by.parallel_tools, self.parallel_tools, |n| {
                n.to_string()
            }),
        };
        (budgets, narrowing.refusals)
    }

    /// As `narrowed`, for overrides that come from a task: zero is refused too.
    pub(super) fn narrow(&self, by: &BudgetOverrides, owner: &str) -> Result<Self, Vec<Violation>> {
        let (budgets, mut refusals) = self.narrowed(by, owner);
        let zeros = [
            ("steps", by.steps == Some(0)),
            ("model_calls", by.model_calls == Some(0)),
            ("step_time", by.step_time == Some(Duration::ZERO)),
            ("total_time", by.total_time == Some(Duration::ZERO)),
            ("tokens", by.tokens == Some(0)),
            ("cost_usd", by.cost_micros == Some(0)),
            ("parallel_tools", by.parallel_tools == Some(0)),
        ];
        refusals.extend(
            zeros
                .into_iter()
                .filter(|(_, is_zero)| *is_zero)
                .map(|(field, _)| Refusal {
                    field,
                    message: "must be more than 0: leave it out for the policy's own".to_owned(),
                }),
        );
        if refusals.is_empty() {
            return Ok(budgets);
        }
        let violations = refusals.into_iter().map(|Refusal { field, message }| Violation {
            file: None,
            position: None,
            path: format!("budgets.{field}"),
            message,
        });
        Err(violations.collect())
    }
}

struct Narrowing<'a> {
    owner: &'a str,
    refusals: Vec<Refusal>,
}

impl Narrowing<'_> {
    fn always<T: PartialOrd + Copy>(
        &mut self,
        field: &'static str,
        wanted: Option<T>,
        limit: T,
        show: impl Fn(T) -> String,
    ) -> T {
        match wanted {
            Some(wanted) if wanted > limit => {
                let message = widening(&show(wanted), &show(limit), self.owner);
                self.refusals.push(Refusal { field, message });
                limit
            }
            Some(wanted) => wanted,
            None => limit,
        }
    }

    fn optional<T: PartialOrd + Copy>(
        &mut self,
        field: &'static str,
        wanted: Option<T>,
        limit: Option<T>,
        show: impl Fn(T) -> String,
    ) -> Option<T> {
        match limit {
            Some(limit) => Some(self.always(field, wanted, limit, show)),
            None => wanted,
        }
    }
}

/// How every number that is larger than its parent's is refused.
pub(super) fn widening(wanted: &str, limit: &str, owner: &str) -> String {
    format!("`{wanted}` is wider than `{limit}` of policy `{owner}`, and can only be narrower")
}

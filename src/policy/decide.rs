//! The verdict: of all rules that match, the strictest; where none does, the default.

use serde_json::Value;

use super::rules::{Layer, Rule, tool_names};
use super::tools::{self, Tool};
use super::violation::{listed, suggestion};
use super::{Decision, Outside, Policy, Verdict};

/// A tool call, as the model asks for it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub tool: &'a str,
    /// An object. Not yet checked against the tool's schema.
    pub arguments: &'a Value,
}

/// What a verdict rests on.
#[derive(Debug, Clone, Copy)]
enum Ground<'a> {
    Rule(&'a Layer, &'a Rule),
    Default(&'a Layer, Verdict),
}

impl Ground<'_> {
    fn verdict(&self) -> Verdict {
        match self {
            Self::Rule(_, rule) => rule.verdict,
            Self::Default(_, verdict) => *verdict,
        }
    }
}

/// Decides about one call. Pure, and total: any tool name and any arguments get a decision.
pub fn decide(policy: &Policy, request: &Request<'_>) -> Decision {
    let Some(tool) = Tool::named(request.tool) else {
        let root = &policy.layers[0];
        return Decision {
            verdict: Verdict::Deny,
            rule: "default".to_owned(),
            source: root.default_source.clone(),
            reason: format!(
                "no tool `{}`; {}",
                request.tool,
                suggestion(request.tool, &tool_names())
            ),
        };
    };
    let opinions = policy
        .layers
        .iter()
        .filter_map(|layer| opinion(layer, tool, request.arguments));
    let strictest = opinions.reduce(|best, other| if other.verdict() > best.verdict() { other } else { best });
    // The root always has one; should it not, nothing is allowed.
    match strictest.unwrap_or(Ground::Default(&policy.layers[0], Verdict::Deny)) {
        Ground::Rule(layer, rule) => Decision {
            verdict: rule.verdict,
            rule: rule.name.clone(),
            source: rule.source.clone(),
            reason: by_rule(policy, layer, rule, tool),
        },
        Ground::Default(layer, verdict) => Decision {
            verdict,
            rule: "default".to_owned(),
            source: layer.default_source.clone(),
            reason: by_default(policy, layer, verdict, tool),
        },
    }
}

/// What a call can do outside the sandbox: the strictest of all that rules say of it, in whatever file they are.
pub fn outside(policy: &Policy, request: &Request<'_>) -> Option<Outside> {
    let tool = Tool::named(request.tool)?;
    let rules = policy.layers.iter().flat_map(|layer| &layer.rules);
    rules
        .filter(|rule| rule.reaches(tool, request.arguments))
        .filter_map(|rule| rule.effect)
        .max()
}

/// The strictest rule of one layer that matches, else its default.
fn opinion<'a>(layer: &'a Layer, tool: &Tool, arguments: &Value) -> Option<Ground<'a>> {
    let matching = layer.rules.iter().filter(|rule| rule.matches(tool, arguments));
    // Of equals the first, so that the order of a file changes no more than the name.
    let strictest = matching.reduce(|best, rule| if rule.verdict > best.verdict { rule } else { best });
    match (strictest, layer.default) {
        (Some(rule), _) => Some(Ground::Rule(layer, rule)),
        (None, Some(verdict)) => Some(Ground::Default(layer, verdict)),
        (None, None) => None,
    }
}

fn by_rule(policy: &Policy, layer: &Layer, rule: &Rule, tool: &Tool) -> String {
    let because = rule
        .reason
        .as_ref()
        .map(|reason| format!(": {reason}"))
        .unwrap_or_default();
    let (name, owner, tool_name) = (&rule.name, &layer.policy, tool.name);
    match rule.verdict {
        Verdict::Allow => format!("rule `{name}` of policy `{owner}` allows this `{tool_name}` call{because}"),
        Verdict::Ask => {
            format!("rule `{name}` of policy `{owner}` asks a person about this `{tool_name}` call{because}")
        }
        Verdict::Deny => format!(
            "rule `{name}` of policy `{owner}` denies this `{tool_name}` call{because}. {}",
            instead(policy, tool)
        ),
    }
}

fn by_default(policy: &Policy, layer: &Layer, verdict: Verdict, tool: &Tool) -> String {
    let owner = &layer.policy;
    match verdict {
        Verdict::Allow | Verdict::Ask => {
            format!(
                "no rule of policy `{owner}` matches this `{}` call, so a person is asked",
                tool.name
            )
        }
        Verdict::Deny => format!(
            "no rule of policy `{owner}` allows this `{}` call. {}",
            tool.name,
            instead(policy, tool)
        ),
    }
}

/// What the model could do in place of a denied call of `tool`.
fn instead(policy: &Policy, tool: &Tool) -> String {
    // The narrowest layer that speaks about every call.
    let closed = policy.layers.iter().rfind(|layer| layer.default.is_some());
    let rules: &[Rule] = closed.map_or(&[], |layer| &layer.rules);
    let may = |tool: &Tool| -> Vec<&Rule> {
        let rules = rules.iter();
        rules
            .filter(|rule| rule.verdict != Verdict::Deny && rule.tools.include(tool))
            .collect()
    };
    let open = may(tool);
    if open.iter().any(|rule| rule.matchers.is_empty()) {
        return format!("Other `{}` calls are possible.", tool.name);
    }
    if !open.is_empty() {
        let ways = open.iter().map(|rule| {
            let conditions: Vec<String> = rule.matchers.iter().map(|matcher| matcher.describe()).collect();
            conditions.join(" and ")
        });
        return format!(
            "Otherwise `{}` is possible where {}.",
            tool.name,
            ways.collect::<Vec<_>>().join(", or where ")
        );
    }
    let others = tools::ALL
        .iter()
        .filter(|other| !may(other).is_empty())
        .map(|other| other.name);
    match listed(others) {
        none if none.is_empty() => "No tool is possible under this policy.".to_owned(),
        names => format!("Possible tools: {names}."),
    }
}

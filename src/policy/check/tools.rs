//! Rules: names, tools, matchers, and what a child may say beside its parent.

use std::collections::BTreeSet;

use super::super::Verdict;
use super::super::document::escape;
use super::super::input::{RuleInput, ToolNames, ToolsInput};
use super::super::rules::{Layer, Matcher, Rule, Tools};
use super::super::tools;
use super::super::violation::listed;
use super::Checker;

impl Checker<'_> {
    /// The parent's layers and, last, this file's own.
    pub(super) fn layers(&mut self, policy: &str, written: &ToolsInput) -> Vec<Layer> {
        let mut names = BTreeSet::new();
        let mut rules = Vec::new();
        for (n, rule) in written.rules.iter().enumerate() {
            self.rule_name(n, rule, &mut names);
            rules.extend(self.rule(n, rule));
        }
        let mut layers: Vec<Layer> = self.parent.map(|parent| parent.layers.clone()).unwrap_or_default();
        let default = self.default_verdict(written.default);
        layers.push(Layer {
            policy: policy.to_owned(),
            default,
            default_source: self.document.source("/tools/default"),
            rules,
        });
        layers
    }

    fn default_verdict(&mut self, written: Option<Verdict>) -> Option<Verdict> {
        let pointer = "/tools/default";
        let inherited = self.parent.map(|parent| {
            let defaults = parent.layers.iter().filter_map(|layer| layer.default);
            (defaults.max().unwrap_or(Verdict::Deny), parent.name.clone())
        });
        match (written, inherited) {
            (Some(Verdict::Allow), _) => {
                let rule = "write a rule with `tool = \"*\"` to allow every tool";
                self.problem(
                    pointer,
                    format!("`allow` cannot be the default, only `deny` or `ask`: {rule}"),
                );
            }
            (Some(own), Some((inherited, owner))) if own < inherited => {
                let message = super::widening(&own.to_string(), &inherited.to_string(), &owner);
                self.problem(pointer, message);
            }
            (Some(_) | None, _) => {}
        }
        match (written, self.parent) {
            (None, None) => Some(Verdict::Deny),
            (written, _) => written,
        }
    }

    fn rule_name(&mut self, n: usize, rule: &RuleInput, names: &mut BTreeSet<String>) {
        let Some(name) = &rule.name else { return };
        let pointer = format!("/tools/rules/{n}/name");
        let inherited = self.parent.and_then(|parent| {
            let mut layers = parent.layers.iter();
            let layer = layers.find(|layer| layer.rules.iter().any(|rule| rule.name == *name))?;
            Some(layer.policy.clone())
        });
        if name == "default" {
            self.problem(
                &pointer,
                "`default` is the name of what holds where no rule matches: choose another",
            );
        } else if !names.insert(name.clone()) {
            self.problem(&pointer, format!("there are two rules `{name}`: names must differ"));
        } else if let Some(owner) = inherited {
            let message =
                format!("policy `{owner}` has a rule `{name}`, which cannot be replaced: choose another name");
            self.problem(&pointer, message);
        }
    }

    /// `None` where the rule lacks something or is wrong; that has been reported.
    fn rule(&mut self, n: usize, written: &RuleInput) -> Option<Rule> {
        let pointer = format!("/tools/rules/{n}");
        let tools = self.rule_tools(&format!("{pointer}/tool"), written.tool.as_ref());
        // Patterns are checked even where the tool is unknown.
        let any = Tools::All;
        let mut matchers = Vec::new();
        for (key, text) in written.matches.iter().flatten() {
            match Matcher::parse(key, text, tools.as_ref().unwrap_or(&any)) {
                Ok(matcher) => matchers.push(matcher),
                Err(message) => self.problem(&format!("{pointer}/match/{}", escape(key)), message),
            }
        }
        let (tools, verdict, name) = (tools?, written.verdict?, written.name.clone()?);
        self.no_new_tools(&format!("{pointer}/verdict"), verdict, &tools);
        Some(Rule {
            name,
            tools,
            verdict,
            effect: written.effect,
            reason: written.reason.clone(),
            matchers,
            source: self.document.source(&pointer),
        })
    }

    fn rule_tools(&mut self, pointer: &str, written: Option<&ToolNames>) -> Option<Tools> {
        let (names, is_list) = match written? {
            ToolNames::One(name) => (std::slice::from_ref(name), false),
            ToolNames::Many(names) => (names.as_slice(), true),
        };
        match Tools::parse(names.iter().map(String::as_str)) {
            Ok(tools) => Some(tools),
            Err(wrong) => {
                for (n, message) in wrong {
                    let pointer = if is_list {
                        format!("{pointer}/{n}")
                    } else {
                        pointer.to_owned()
                    };
                    self.problem(&pointer, message);
                }
                None
            }
        }
    }

    /// A child that allows, or asks about, a tool that its parent never does would look wider than it is.
    fn no_new_tools(&mut self, pointer: &str, verdict: Verdict, tools: &Tools) {
        let (Some(parent), Tools::These(names)) = (self.parent, tools) else {
            return;
        };
        // The most lenient that each layer can come to, and the strictest of those.
        let at_best = |tool: &tools::Tool| {
            let layers = parent.layers.iter().filter_map(|layer| {
                let rules = layer.rules.iter().filter(|rule| rule.tools.include(tool));
                let by_rule = rules.map(|rule| rule.verdict).min();
                layer
                    .default
                    .map(|default| by_rule.map_or(default, |verdict| verdict.min(default)))
            });
            layers.max().unwrap_or(Verdict::Deny)
        };
        for tool in tools::ALL.iter().filter(|tool| names.contains(tool.name)) {
            let best = at_best(tool);
            if verdict < best {
                let possible = tools::ALL
                    .iter()
                    .filter(|tool| at_best(tool) < Verdict::Deny)
                    .map(|tool| tool.name);
                let message = format!(
                    "`{verdict}` for `{}` is wider than `{best}`, the most that policy `{}` gives; its tools are {}",
                    tool.name,
                    parent.name,
                    listed(possible)
                );
                self.problem(pointer, message);
            }
        }
    }
}

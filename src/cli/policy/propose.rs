//! `exuvia policy propose`: from what a run or a sandbox wanted of the network to the smallest rules that would have served it.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::Answer;
use crate::border::decision_of;
use crate::cli::audit::network::decided;
use crate::cli::{Context, Error, Exit};
use crate::egress::journal::{Decision, Outcome};
use crate::egress::propose;
use crate::egress::rules::{Rule, Target, Tls, builtin};

pub(super) async fn propose_for(of: &str, context: &Context) -> Result<Answer, Error> {
    let (_, found) = decided(of, usize::MAX, context).await?;
    let decisions: Vec<Decision> = found
        .entries
        .iter()
        .filter_map(|entry| decision_of(&entry.record))
        .collect();
    let (wanted, never): (Vec<Decision>, Vec<Decision>) = decisions.into_iter().partition(could_be_served);
    let rules = propose(&wanted);
    let refused = never.len();
    let text = text(of, &rules, refused);
    let object = json!({ "of": of, "rules": rules.iter().map(form).collect::<Vec<_>>(), "left_refused": refused });
    Ok((Exit::Ok, object, text))
}

/// A rule serves what was let through, and what was refused because there was none. What a rule of the policy denies, what leads to a
/// closed address, leaks or lies about its name stays refused.
fn could_be_served(decision: &Decision) -> bool {
    match decision.outcome {
        Outcome::Allowed | Outcome::Failed => true,
        Outcome::Denied | Outcome::Cut => decision.rule == builtin::DEFAULT_DENY,
    }
}

fn text(of: &str, rules: &[Rule], refused: usize) -> String {
    let mut text = format!(
        "# What {of} wanted of the network, and no more. Read it before you use it: whoever wrote the programs chose these.\n"
    );
    if refused > 0 {
        let _infallible = writeln!(
            text,
            "# {refused} more were refused for what they are; no rule serves them."
        );
    }
    if rules.is_empty() {
        return text + "# Nothing that a rule could serve.\n";
    }
    text += "[network]\nmode = \"proxy\"\n";
    for rule in rules {
        text += "\n[[network.allow]]\n";
        let Value::Object(fields) = form(rule) else { continue };
        for (name, value) in fields {
            let _infallible = writeln!(text, "{name} = {value}");
        }
    }
    text
}

/// As a policy has it. A JSON text or list of texts is one of TOML, too.
fn form(rule: &Rule) -> Value {
    let mut form = serde_json::Map::new();
    let plain = rule.tls == Tls::Off;
    match &rule.target {
        Target::Host(pattern) => form.insert("host".to_owned(), pattern.to_string().into()),
        Target::Cidr(net) => form.insert("cidr".to_owned(), net.to_string().into()),
    };
    match rule.ports.as_slice() {
        [443] => None,
        [port] => form.insert("port".to_owned(), (*port).into()),
        ports => form.insert("port".to_owned(), ports.into()),
    };
    if !rule.methods.is_empty() {
        form.insert("methods".to_owned(), rule.methods.clone().into());
    }
    if !rule.paths.is_empty() {
        let paths: Vec<&str> = rule.paths.iter().map(|path| path.as_str()).collect();
        form.insert("path".to_owned(), paths.into());
    }
    if plain && rule.ports != [80] {
        form.insert("tls".to_owned(), "off".into());
    }
    Value::Object(form)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::egress::rules::Action;
    use crate::policy::{Document, Presets, check};

    /// What is proposed is a policy, and says the same.
    #[test]
    fn a_proposal_is_a_policy() {
        let rule = |id: &str, target: Target, ports: &[u16], methods: &[&str], paths: &[&str], tls: Tls| {
            let mut rule = Rule::new(id, Action::Allow, target);
            rule.ports = ports.to_vec();
            rule.methods = methods.iter().map(|one| (*one).to_owned()).collect();
            rule.paths = paths.iter().map(|one| one.parse().unwrap()).collect();
            rule.tls = tls;
            rule
        };
        let host = |name: &str| Target::Host(name.parse().unwrap());
        let rules = [
            rule("a", host("a.example.com"), &[443], &["GET"], &["/x", "/y"], Tls::Auto),
            rule("b", host("b.example.com"), &[80], &["GET"], &["/"], Tls::Off),
            rule(
                "c",
                Target::Cidr("1.2.3.4/32".parse().unwrap()),
                &[8080],
                &[],
                &[],
                Tls::Off,
            ),
        ];
        let text = text("run_x", &rules, 2);
        insta::assert_snapshot!(text);
        let document = Document::parse("t.toml", &format!("format_version = 1\nname = \"t\"\n{text}")).unwrap();
        let policy = check(&document, None, &Presets::default()).unwrap();
        assert_eq!(policy.network().rules().len(), 3);
    }
}

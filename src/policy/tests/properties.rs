//! What holds for any rules and any call.

use proptest::prelude::*;

use super::*;

fn any_rule() -> impl Strategy<Value = String> {
    let tool = prop::sample::select(vec!["shell", "read_file", "write_file", "search", "finish", "*"]);
    let verdict = prop::sample::select(vec!["allow", "ask", "deny"]);
    let matcher = prop::sample::select(vec!["", "command", "path", "path_within"]);
    (tool, verdict, matcher, "[ab./*]{1,4}").prop_map(|(tool, verdict, matcher, text)| {
        let fits =
            |name: &str| tool == "*" || tools::Tool::named(tool).is_some_and(|tool| tool.argument(name).is_some());
        let condition = match matcher {
            "command" if fits("command") => format!("match = {{ command = '{}' }}\n", text.replace('*', ".*")),
            "path" if fits("path") => format!("match = {{ path = '{}' }}\n", text.replace('*', ".*")),
            "path_within" if fits("path") => "match = { path_within = '/workspace/a' }\n".to_owned(),
            _ => String::new(),
        };
        format!("tool = \"{tool}\"\nverdict = \"{verdict}\"\n{condition}")
    })
}

fn any_rules() -> impl Strategy<Value = Vec<String>> {
    prop::collection::vec(any_rule(), 0..6)
}

fn named(prefix: &str, rules: &[String]) -> String {
    let named = rules
        .iter()
        .enumerate()
        .map(|(n, rule)| format!("[[tools.rules]]\nname = \"{prefix}{n}\"\n{rule}"));
    named.collect()
}

fn any_call() -> impl Strategy<Value = (String, Value)> {
    let tool = prop::sample::select(vec![
        "shell",
        "read_file",
        "write_file",
        "search",
        "finish",
        "list_files",
        "other",
    ]);
    let value = prop_oneof![
        "[ab./]{0,6}".prop_map(Value::from),
        "\\PC{0,10}".prop_map(Value::from),
        any::<i32>().prop_map(Value::from),
        Just(Value::Null),
        Just(json!(["a"])),
    ];
    let arguments = prop::collection::btree_map(prop::sample::select(vec!["command", "path", "pattern"]), value, 0..3);
    (tool, arguments).prop_map(|(tool, arguments)| (tool.to_owned(), json!(arguments)))
}

proptest! {
    /// Promise 3: an allow always has a rule that says so, and no rule that matches says otherwise.
    #[test]
    fn nothing_is_allowed_without_a_rule((tool, arguments) in any_call(), rules in any_rules(), seed in any::<u64>()) {
        let ordered = policy(&named("r", &rules));
        let decision = decide(&ordered, &Request { tool: &tool, arguments: &arguments });
        let layer = &ordered.layers()[0];
        match layer.rules.iter().find(|rule| rule.name == decision.rule) {
            Some(rule) => prop_assert_eq!(rule.verdict, decision.verdict),
            None => prop_assert_eq!((decision.verdict, decision.rule.as_str()), (Verdict::Deny, "default")),
        }
        // Without its allow rules the same policy allows nothing.
        let stripped: Vec<String> = rules.iter().filter(|rule| !rule.contains("\"allow\"")).cloned().collect();
        let strict = policy(&named("r", &stripped));
        let without = decide(&strict, &Request { tool: &tool, arguments: &arguments }).verdict;
        prop_assert!(without > Verdict::Allow);
        // The order of the rules means nothing.
        let mut shuffled = rules.clone();
        shuffled.rotate_left(seed as usize % rules.len().max(1));
        let shuffled = policy(&named("r", &shuffled));
        prop_assert_eq!(decide(&shuffled, &Request { tool: &tool, arguments: &arguments }).verdict, decision.verdict);
    }

    /// A child can only narrow, whatever its rules.
    #[test]
    fn a_child_is_never_more_lenient((tool, arguments) in any_call(), rules in any_rules(), own in any_rules()) {
        let parent = policy(&named("r", &rules));
        if let Ok(child) = child(&named("own", &own), &parent) {
            let request = Request { tool: &tool, arguments: &arguments };
            let (narrow, wide) = (decide(&child, &request).verdict, decide(&parent, &request).verdict);
            prop_assert!(narrow >= wide, "{} is more lenient than {}", narrow, wide);
            prop_assert_eq!(Policy::from_snapshot(&child.snapshot()).unwrap(), child);
        }
    }

    /// No file panics, and whatever is refused has a reason.
    #[test]
    fn any_text_is_a_policy_or_has_problems(text in "(\\[\\[?(tools|limits|mounts|tools\\.rules)\\]\\]?|[a-z_.]{1,6} ?= ?(1|\"a\"|\\[\\]|\\{\\}|true)|\\PC{0,5}|\n){0,20}") {
        if let Err(violations) = parse(&text, None) {
            prop_assert!(!violations.is_empty());
        }
    }
}

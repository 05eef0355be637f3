use super::*;

fn rule(id: &str, action: Action, target: &str) -> Rule {
    let target = match target.parse() {
        Ok(net) => Target::Cidr(net),
        Err(_) => Target::Host(target.parse().unwrap()),
    };
    Rule::new(id, action, target)
}

fn rules(rules: Vec<Rule>) -> Rules {
    Rules::compile(rules).unwrap()
}

fn host(text: &str) -> Host {
    Host::parse(text.as_bytes()).unwrap()
}

fn request(rules: &Rules, name: &str, method: &str, path: &str) -> String {
    let verdict = rules.decide(Request {
        host: &host(name),
        port: 443,
        http: Some(Http {
            method,
            path: &Path::of(path),
        }),
    });
    format!("{:?} {}", verdict.action, verdict.rule)
}

fn paths(mut rule: Rule, methods: &[&str], paths: &[&str]) -> Rule {
    rule.methods = methods.iter().map(|method| (*method).to_owned()).collect();
    rule.paths = paths.iter().map(|path| path.parse().unwrap()).collect();
    rule
}

/// Z2: an empty list allows nothing.
#[test]
fn nothing_is_allowed_by_default() {
    let none = rules(vec![]);
    assert_eq!(request(&none, "a.example", "GET", "/"), "Deny builtin:default-deny");
    assert_eq!(
        none.reach(&host("a.example"), 443, true),
        Reach::Closed(builtin::DEFAULT_DENY)
    );
}

/// T20: port scope.
#[test]
fn a_rule_is_about_its_ports_alone() {
    let one = rules(vec![rule("r", Action::Allow, "a.example")]);
    let whole = Reach::Whole {
        verdict: Verdict {
            action: Action::Allow,
            rule: "r".into(),
        },
        wire: Wire::Tls,
    };
    assert_eq!(one.reach(&host("a.example"), 443, false), whole);
    assert_eq!(
        one.reach(&host("a.example"), 80, false),
        Reach::Closed(builtin::DEFAULT_DENY)
    );
    assert_eq!(
        one.reach(&host("93.184.216.34"), 443, false),
        Reach::Closed(builtin::DEFAULT_DENY)
    );
}

#[test]
fn a_denial_wins_and_the_specific_goes_before_the_general() {
    let many = rules(vec![
        rule("ask-all", Action::Ask, "*.example.com"),
        rule("api", Action::Allow, "api.example.com"),
        paths(rule("writes", Action::Ask, "api.example.com"), &["POST"], &[]),
        paths(rule("admin", Action::Deny, "*.example.com"), &[], &["/admin/**"]),
    ]);
    for (name, method, path, verdict) in [
        ("api.example.com", "GET", "/x", "Allow api"),
        ("api.example.com", "POST", "/x", "Ask writes"),
        ("www.example.com", "GET", "/x", "Ask ask-all"),
        ("api.example.com", "GET", "/admin/x", "Deny admin"),
        ("www.example.com", "GET", "/x/%2e%2e/admin/x", "Deny admin"),
        ("example.com", "GET", "/", "Deny builtin:default-deny"),
    ] {
        assert_eq!(request(&many, name, method, path), verdict, "{name} {method} {path}");
    }
    let each = Reach::EachRequest {
        rule: "writes".into(),
        wire: Wire::Tls,
    };
    assert_eq!(many.reach(&host("api.example.com"), 443, false), each);
}

#[test]
fn equals_are_told_by_ask_and_then_by_order() {
    let same = rules(vec![
        rule("first", Action::Allow, "a.example"),
        rule("second", Action::Allow, "a.example"),
    ]);
    assert_eq!(request(&same, "a.example", "GET", "/"), "Allow first");
    let ask = rules(vec![
        rule("open", Action::Allow, "a.example"),
        rule("ask", Action::Ask, "a.example"),
    ]);
    assert_eq!(request(&ask, "a.example", "GET", "/"), "Ask ask");
}

#[test]
fn what_must_be_seen_is_opened() {
    let plain = rules(vec![rule("r", Action::Allow, "a.example")]);
    let opened = |reach: Reach| matches!(reach, Reach::EachRequest { wire: Wire::Tls, .. });
    assert!(!opened(plain.reach(&host("a.example"), 443, false)) && opened(plain.reach(&host("a.example"), 443, true)));
    let forced = Rule {
        tls: Tls::Open,
        ..rule("r", Action::Allow, "a.example")
    };
    assert!(opened(rules(vec![forced]).reach(&host("a.example"), 443, false)));
    let at = |port: u16, tls: Tls| {
        let ports = vec![port];
        let rule = Rule {
            ports,
            tls,
            ..rule("r", Action::Allow, "a.example")
        };
        match rules(vec![rule]).reach(&host("a.example"), port, false) {
            Reach::Whole { wire, .. } | Reach::EachRequest { wire, .. } => wire,
            Reach::Closed(rule) => panic!("{rule}"),
        }
    };
    let wires = [
        at(80, Tls::Auto),
        at(80, Tls::Off),
        at(22, Tls::Off),
        at(8443, Tls::Auto),
        at(80, Tls::Open),
    ];
    assert_eq!(wires, [Wire::Http, Wire::Http, Wire::Raw, Wire::Tls, Wire::Tls]);
}

/// T19, T20: rebinding, and who opens everything.
#[test]
fn a_closed_block_opens_only_by_a_range_inside_it() {
    let open = |ranges: &[&str], address: &str| {
        let list = ranges.iter().map(|range| rule(range, Action::Allow, range)).collect();
        match rules(list).check_address(address.parse().unwrap(), 443) {
            Ok(()) => "open".to_owned(),
            Err(BadAddress::Closed(block)) => block.name.to_owned(),
            Err(BadAddress::Denied(rule)) => rule.to_string(),
        }
    };
    assert_eq!(open(&[], "93.184.216.34"), "open");
    assert_eq!(open(&[], "10.0.0.1"), "private");
    assert_eq!(open(&["0.0.0.0/0"], "10.0.0.1"), "private");
    assert_eq!(open(&["10.0.0.0/24"], "10.0.0.1"), "open");
    assert_eq!(open(&["10.0.0.0/24"], "10.0.1.1"), "private");
    assert_eq!(open(&["169.254.0.0/16"], "169.254.169.254"), "metadata");
    assert_eq!(open(&["169.254.169.254/32"], "169.254.169.254"), "open");
    assert_eq!(open(&["10.0.0.0/24"], "::ffff:10.0.0.1"), "v4-mapped");
    let narrowed = rules(vec![
        rule("lab", Action::Allow, "10.0.0.0/8"),
        rule("not-that", Action::Deny, "10.0.0.1/32"),
    ]);
    let denied = Err(BadAddress::Denied("not-that".into()));
    assert_eq!(narrowed.check_address("10.0.0.1".parse().unwrap(), 443), denied);
    assert_eq!(narrowed.check_address("::ffff:10.0.0.1".parse().unwrap(), 443), denied);
    assert_eq!(narrowed.check_address("10.0.0.2".parse().unwrap(), 443), Ok(()));
    assert!(matches!(
        narrowed.check_address("10.0.0.2".parse().unwrap(), 80),
        Err(BadAddress::Closed(_))
    ));
}

#[test]
fn all_problems_come_at_once() {
    let mut bad = paths(rule("a", Action::Allow, "10.0.0.0/8"), &["get", ""], &[]);
    bad.ports = vec![];
    let list = vec![
        bad,
        rule("a", Action::Allow, "a.example"),
        rule("builtin:x", Action::Deny, "a.example"),
    ];
    let problems: Vec<String> = Rules::compile(list)
        .unwrap_err()
        .iter()
        .map(ToString::to_string)
        .collect();
    let expected = [
        "rule `a` has no port, or port 0",
        "rule `a`: `get` is no method in upper case",
        "rule `a`: `` is no method in upper case",
        "rule `a` cannot open TLS to an address: methods and paths need `tls = false` there",
        "rule `a` stands twice",
        "rule `builtin:x` has a name that is kept for the border itself",
    ];
    assert_eq!(problems, expected);
}

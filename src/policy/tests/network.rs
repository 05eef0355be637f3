//! The network and its secrets: what is refused, what is decided, what a child may say, and the stored form.

use std::fmt::Write as _;

use super::*;
use crate::egress::name::Host;
use crate::policy::network::{self, Mode, Wish};

fn reached(policy: &Policy, target: &str, http: Option<(&str, &str)>) -> (Verdict, String) {
    let (host, port) = target.rsplit_once(':').unwrap();
    let host = Host::parse(host.as_bytes()).unwrap();
    let port = port.parse().unwrap();
    let decision = network::decide(
        policy,
        &Wish {
            host: &host,
            port,
            http,
        },
    );
    (decision.verdict, decision.rule)
}

const OPEN: &str = r#"
[network]
mode = "proxy"
presets = ["pypi"]
[[network.allow]]
host = "api.example.com"
[[network.allow]]
name = "cdn"
host = "*.cdn.example.com"
port = [80, 443]
[[network.allow]]
name = "repo"
host = "git.example.com"
methods = ["GET", "POST"]
path = ["/team/", "/public/*/info"]
[[network.deny]]
name = "not-this"
host = "secret.cdn.example.com"
[network.budgets]
bytes_up = "1MiB"
"#;

/// S1: each of these would open more than it says, or nothing at all.
#[test]
fn what_would_be_a_hole_is_refused_with_its_place() {
    let rule = |fields: &str| format!("[network]\nmode = \"proxy\"\n[[network.allow]]\n{fields}\n");
    let secret = |fields: &str| {
        format!(
            "[network]\nmode = \"proxy\"\n[[network.allow]]\nhost = \"api.example.com\"\n[[credentials]]\nname = \"token\"\n{fields}\n"
        )
    };
    let cases = [
        ("a top-level domain", rule("host = \"*.com\"")),
        ("a public suffix", rule("host = \"*.co.uk\"")),
        ("a public suffix of a company", rule("host = \"*.github.io\"")),
        ("all hosts", rule("host = \"*\"")),
        ("a star elsewhere", rule("host = \"api.*.example.com\"")),
        ("an address as a host", rule("host = \"10.0.0.1\"")),
        ("an address in disguise", rule("host = \"0x7f.1\"")),
        ("a host with a port", rule("host = \"api.example.com:443\"")),
        ("a URL", rule("host = \"https://api.example.com/\"")),
        ("port 0", rule("host = \"a.example.com\"\nport = 0")),
        ("no such port", rule("host = \"a.example.com\"\nport = 70000")),
        ("no ports", rule("host = \"a.example.com\"\nport = []")),
        ("two targets", rule("host = \"a.example.com\"\ncidr = \"10.0.0.0/8\"")),
        ("no target", rule("port = 443")),
        ("bits behind the prefix", rule("cidr = \"10.1.2.3/8\"")),
        ("no range", rule("cidr = \"ten\"")),
        (
            "requests inside of what is not opened",
            rule("cidr = \"10.0.0.0/8\"\nmethods = [\"GET\"]"),
        ),
        (
            "a method in lower case",
            rule("host = \"a.example.com\"\nmethods = [\"get\"]"),
        ),
        (
            "a path that climbs",
            rule("host = \"a.example.com\"\npath = \"/a/../b\""),
        ),
        (
            "a path that does not begin",
            rule("host = \"a.example.com\"\npath = \"a\""),
        ),
        (
            "a kind of TLS that there is not",
            rule("host = \"a.example.com\"\ntls = \"sometimes\""),
        ),
        (
            "two of one name",
            rule("name = \"x\"\nhost = \"a.example.com\"\n[[network.allow]]\nname = \"x\"\nhost = \"b.example.com\""),
        ),
        (
            "rules that nothing follows",
            "[[network.allow]]\nhost = \"a.example.com\"\n".to_owned(),
        ),
        (
            "no such preset",
            "[network]\nmode = \"proxy\"\npresets = [\"pipy\", \"../etc\"]\n".to_owned(),
        ),
        (
            "modes that are not enforced",
            "[network]\nmode = \"learn\"\n".to_owned(),
        ),
        (
            "a mode that there is not",
            "[network]\nmode = \"transparent\"\n".to_owned(),
        ),
        (
            "a question to a person",
            rule("host = \"a.example.com\"\nverdict = \"ask\""),
        ),
        (
            "a budget of nothing",
            "[network]\nmode = \"proxy\"\n[network.budgets]\nconnections = 0\nbytes_up = \"0\"\ntime = \"soon\"\n"
                .to_owned(),
        ),
        (
            "a secret in the file",
            secret("from = \"sk-live-1234567890\"\ninject = { host = \"api.example.com\" }"),
        ),
        (
            "a program without a path",
            secret("from = \"command:pass show x\"\ninject = { host = \"api.example.com\" }"),
        ),
        (
            "a secret for a host that is closed",
            secret("from = \"env:T\"\ninject = { host = \"other.example.com\" }"),
        ),
        (
            "a secret for a port that is closed",
            secret("from = \"env:T\"\ninject = { host = \"api.example.com\", port = 8443 }"),
        ),
        (
            "a secret for more than is open",
            secret("from = \"env:T\"\ninject = { host = \"*.com\" }"),
        ),
        (
            "a secret in two places",
            secret("from = \"env:T\"\ninject = { host = \"api.example.com\", header = \"x-key\", query = \"key\" }"),
        ),
        ("a secret in no place", secret("from = \"env:T\"")),
        (
            "a form without a place for the secret",
            secret("from = \"env:T\"\ninject = { host = \"api.example.com\", header = \"x-key\", format = \"token\" }"),
        ),
        (
            "a form with a line break",
            secret(
                "from = \"env:T\"\ninject = { host = \"api.example.com\", header = \"x-key\", format = \"{}\\r\\nx: y\" }",
            ),
        ),
        (
            "a header that is none",
            secret("from = \"env:T\"\ninject = { host = \"api.example.com\", header = \"x key\" }"),
        ),
        (
            "a secret that is given away",
            secret("from = \"env:T\"\nenv = \"T\"\nexpose = \"env\""),
        ),
        (
            "a variable that is none",
            secret("from = \"env:T\"\nenv = \"A B\"\ninject = { host = \"api.example.com\" }"),
        ),
        (
            "a secret without a network",
            "[[credentials]]\nname = \"token\"\nfrom = \"env:T\"\ninject = { host = \"api.example.com\" }\n".to_owned(),
        ),
        (
            "two secrets of one name and variable",
            secret(
                "from = \"env:T\"\nenv = \"T\"\ninject = { host = \"api.example.com\" }\n[[credentials]]\nname = \"token\"\nfrom = \"env:U\"\nenv = \"T\"\ninject = { host = \"api.example.com\", header = \"x-key\" }",
            ),
        ),
    ];
    let mut golden = String::new();
    for (title, body) in cases {
        let violations = parse(&format!("{HEAD}{body}"), None).expect_err(title);
        let text = violation::lines(&violations);
        assert!(!text.contains("sk-live"), "a secret is not shown");
        let _ = writeln!(golden, "# {title}\n{text}\n");
    }
    insta::assert_snapshot!(golden);
}

#[test]
fn each_decision_names_its_rule() {
    let policy = policy(OPEN);
    assert_eq!(policy.network().mode(), Mode::Proxy);
    let cases = [
        ("api.example.com:443", None, Verdict::Allow, "api.example.com"),
        ("api.example.com:80", None, Verdict::Deny, "builtin:default-deny"),
        ("example.com:443", None, Verdict::Deny, "builtin:default-deny"),
        ("cdn.example.com:443", None, Verdict::Deny, "builtin:default-deny"),
        ("a.b.cdn.example.com:80", None, Verdict::Allow, "cdn"),
        ("secret.cdn.example.com:443", None, Verdict::Deny, "not-this"),
        ("git.example.com:443", Some(("GET", "/team/x")), Verdict::Allow, "repo"),
        (
            "git.example.com:443",
            Some(("PUT", "/team/x")),
            Verdict::Deny,
            "builtin:default-deny",
        ),
        (
            "git.example.com:443",
            Some(("GET", "/other")),
            Verdict::Deny,
            "builtin:default-deny",
        ),
        (
            "git.example.com:443",
            Some(("GET", "/team/%2e%2e/other")),
            Verdict::Deny,
            "builtin:default-deny",
        ),
        (
            "git.example.com:443",
            Some(("GET", "/public/a/info")),
            Verdict::Allow,
            "repo",
        ),
        (
            "pypi.org:443",
            Some(("GET", "/simple/six/")),
            Verdict::Allow,
            "pypi/index",
        ),
        (
            "pypi.org:443",
            Some(("POST", "/simple/six/")),
            Verdict::Deny,
            "builtin:default-deny",
        ),
        ("169.254.169.254:80", None, Verdict::Deny, "builtin:default-deny"),
    ];
    for (target, http, verdict, rule) in cases {
        assert_eq!(
            reached(&policy, target, http),
            (verdict, rule.to_owned()),
            "{target} {http:?}"
        );
    }
    for target in ["api.example.com:443", "pypi.org:443"] {
        let none = built_in("default");
        assert_eq!(reached(&none, target, None), (Verdict::Deny, "network.mode".to_owned()));
    }
}

/// A child opens nothing that its parent does not.
#[test]
fn a_child_narrows_the_network() {
    let parent = policy(&format!(
        "{OPEN}[[credentials]]\nname = \"token\"\nfrom = \"env:T\"\ninject = {{ host = \"api.example.com\" }}\n"
    ));
    let same = child("", &parent).unwrap();
    assert_eq!(
        (same.network(), same.credentials()),
        (parent.network(), parent.credentials())
    );
    let less = child("[network]\n[[network.allow]]\nhost = \"x.cdn.example.com\"\n", &parent).unwrap();
    assert_eq!(reached(&less, "x.cdn.example.com:443", None).0, Verdict::Allow);
    for closed in [
        "y.cdn.example.com:443",
        "api.example.com:443",
        "secret.cdn.example.com:443",
        "pypi.org:443",
    ] {
        assert_eq!(reached(&less, closed, None).0, Verdict::Deny, "{closed}");
    }
    let none = child("[network]\nmode = \"none\"\n", &parent).unwrap();
    assert_eq!((none.network().mode(), none.credentials().len()), (Mode::None, 0));
    let narrower = child(
        "[network]\n[[network.allow]]\nhost = \"git.example.com\"\nmethods = [\"GET\"]\npath = \"/team/a/\"\n",
        &parent,
    );
    assert!(narrower.is_ok(), "{narrower:?}");
    for (wider, message) in [
        (
            "[network]\n[[network.allow]]\nhost = \"other.example.com\"\n",
            "opens what no one rule of policy `t` opens",
        ),
        (
            "[network]\n[[network.allow]]\nhost = \"*.example.com\"\n",
            "opens what no one rule of policy `t` opens",
        ),
        (
            "[network]\n[[network.allow]]\nhost = \"api.example.com\"\nport = [443, 8443]\n",
            "opens what no one rule of policy `t` opens",
        ),
        (
            "[network]\n[[network.allow]]\nhost = \"git.example.com\"\n",
            "opens what no one rule of policy `t` opens",
        ),
        (
            "[network]\n[[network.allow]]\nhost = \"git.example.com\"\nmethods = [\"GET\"]\npath = \"/\"\n",
            "opens what no one rule of policy `t` opens",
        ),
        ("[network.budgets]\nbytes_up = \"2MiB\"\n", "`2MiB` is wider"),
        (
            "[[credentials]]\nname = \"other\"\nfrom = \"env:U\"\ninject = { host = \"api.example.com\" }\n",
            "is not one of policy `t`",
        ),
        (
            "[[credentials]]\nname = \"token\"\nfrom = \"env:U\"\ninject = { host = \"api.example.com\" }\n",
            "is not one of policy `t`",
        ),
    ] {
        let problems = child(wider, &parent).unwrap_err();
        assert!(
            problems.len() == 1 && problems[0].contains(message),
            "{wider} {problems:?}"
        );
    }
    let closed = policy("");
    let problems = child("[network]\nmode = \"proxy\"\n", &closed).unwrap_err();
    assert!(
        problems[0].contains("`proxy` is wider than the `none` of policy `t`"),
        "{problems:?}"
    );
}

/// The stored form: this must stay readable, and the hash the same, for ever (requirement E4).
#[test]
fn a_snapshot_keeps_the_network_and_where_secrets_are_but_no_secret() {
    let policy = policy(&format!(
        "{OPEN}[[credentials]]\nname = \"token\"\nfrom = \"env:T\"\nenv = \"TOKEN\"\ninject = {{ host = \"api.example.com\", path = \"/v1/\" }}\n\
         [[credentials]]\nname = \"git\"\nfrom = \"command:/usr/bin/pass show git\"\ninject = {{ host = \"git.example.com\", basic = \"bot\" }}\n\
         [[credentials]]\nname = \"aws\"\nfrom = \"file:/run/key\"\ninject = {{ host = \"a.cdn.example.com\", sigv4 = {{ access_key = \"AKIA\", region = \"eu-1\", service = \"s3\", session_token = \"env:S\" }} }}\n"
    ));
    let snapshot = policy.snapshot();
    insta::assert_json_snapshot!(snapshot);
    assert_eq!(Policy::from_snapshot(&snapshot).unwrap(), policy);
    let other = |from: &str, to: &str| {
        let text = format!("{HEAD}{}", OPEN.replacen(from, to, 1));
        parse(&text, None).unwrap().hash().to_owned()
    };
    let mut hashes = std::collections::BTreeSet::new();
    for (from, to) in [
        ("", ""),
        ("api.example.com", "api.example.org"),
        ("[80, 443]", "[443]"),
        ("/team/", "/teams/"),
        ("\"POST\"", "\"PUT\""),
        ("not-this", "nor-this"),
        ("1MiB", "2MiB"),
        ("presets = [\"pypi\"]", ""),
    ] {
        hashes.insert(other(from, to));
    }
    assert_eq!(hashes.len(), 8, "each change of meaning changes the hash");
}

#[test]
fn every_preset_is_one() {
    for name in ["crates", "debian", "github", "npm", "pypi"] {
        let policy = policy(&format!("[network]\nmode = \"proxy\"\npresets = [\"{name}\"]\n"));
        let rules = policy.network().rules();
        assert!(
            !rules.is_empty() && rules.iter().all(|rule| rule.id.as_str().starts_with(name)),
            "{name}"
        );
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("presets")).unwrap();
    let own = "format_version = 1\nname = \"mine\"\n[[allow]]\nname = \"it\"\nhost = \"my.example.com\"\n";
    std::fs::write(directory.path().join("presets/mine.toml"), own).unwrap();
    let text = format!("{HEAD}[network]\nmode = \"proxy\"\npresets = [\"mine\"]\n");
    let document = Document::parse("t.toml", &text).unwrap();
    let policy = check(&document, None, &Presets::of(directory.path())).unwrap();
    assert_eq!(
        reached(&policy, "my.example.com:443", None),
        (Verdict::Allow, "mine/it".to_owned())
    );
}

//! Files that are wrong, files that extend others, and finding them.

use std::fmt::Write as _;

use super::*;

#[test]
fn every_problem_is_reported_at_once_with_its_place() {
    let cases = [
        ("not TOML, twice", "format_version = \nname = \"x\nlimits = {\n"),
        ("a key twice", "format_version = 1\nname = \"t\"\nname = \"u\"\n"),
        ("nothing at all", ""),
        (
            "no policy but something else",
            "[package]\nname = \"x\"\nversion = \"1\"\n",
        ),
        ("another format version", "format_version = 2\nname = \"t\"\n"),
        (
            "values without JSON",
            "format_version = 1\nname = 2026-01-01\n[limits]\ncpus = inf\npids = 99999999999999999999\n",
        ),
        (
            "wrong at every level",
            r#"format_version = 1
name = "Not A Name"
isolaton = "gvisor"
isolation = "container "
backend = "docker2"
image = "Python:3"
seccomp = "unconfined"

[limits]
cpus = 0
memory = "lots"
swap = "-1"
pids = "many"
open_files = 1
tmp = "1EiB"
wall_time = "soon"
disk = "15MiB"
disk_kind = "zfs"
disc = "1GiB"

[network]
mode = "allowlist"
allow = ["pypi.org"]

[tools]
default = "allow"

[[tools.rules]]
name = "one"
tool = "shel"
verdict = "alow"
match = { command = "(" }

[[tools.rules]]
name = "one"
tool = ["read_file", "search", "bash"]
verdict = "allow"
reson = "typo"

[[tools.rules]]
name = "default"
tool = ["read_file"]
verdict = "deny"
match = { command = ".*", path_within = "workspace", "odd key" = "x" }

[[tools.rules]]
tool = []
match = {}

[budgets]
steps = 0
step_time = "2d"
cost_usd = -1
parallel_tools = 1.5

[[mounts]]
source = "/var/run/docker.sock"
target = "/workspace/x"

[[mounts]]
source = "relative"
target = "/opt/../etc"
mode = "rw"

[[mounts]]
source = "/"

[approvals]
expires = "1s"

[credentials]
key = "env:KEY"
"#,
        ),
        (
            "lists and tables mixed up",
            "format_version = 1\nname = \"t\"\ntools = [1]\nlimits = 5\nmounts = { source = \"/a\" }\n",
        ),
        (
            "items of a wrong type",
            "format_version = 1\nname = \"t\"\nmounts = [1]\n[tools]\nrules = [\"allow\", {}]\n",
        ),
        (
            "a rule on an argument that its tool lacks",
            "format_version = 1\nname = \"t\"\n[[tools.rules]]\nname = \"a\"\ntool = \"shell\"\nverdict = \"allow\"\nmatch = { path_within = \"/workspace\" }\n",
        ),
        (
            "two mounts at one place",
            "format_version = 1\nname = \"t\"\nmounts = [\n  { source = \"/a\", target = \"/x\" },\n  { source = \"/b\", target = \"/x/\" },\n]\n",
        ),
    ];
    let mut golden = String::new();
    for (title, text) in cases {
        let violations = parse(text, None).expect_err(title);
        let _ = writeln!(golden, "# {title}\n{}\n", violation::lines(&violations));
    }
    insta::assert_snapshot!(golden);
}

#[test]
fn a_violation_says_where_it_is() {
    let violations = parse(&format!("{HEAD}[limits]\n  pidz = 3\n"), None).unwrap_err();
    let expected = Violation {
        file: Some("t.toml".to_owned()),
        position: Some(Position { line: 4, column: 3 }),
        path: "limits.pidz".to_owned(),
        message:
            "unknown field; did you mean `pids`? known are `cpus`, `memory`, `swap`, `pids`, `open_files`, `tmp`, \
                  `tmp_inodes`, `shm`, `disk`, `disk_inodes`, `disk_kind`, `disk_read`, `disk_write`, `file_size`, `wall_time`"
                .to_owned(),
    };
    assert_eq!(violations, [expected]);
}

#[test]
fn a_child_inherits_and_narrows() {
    let parent = policy(
        "isolation = \"gvisor\"\n[limits]\nmemory = \"1GiB\"\n[budgets]\ntokens = 1000\n\
         [[tools.rules]]\nname=\"all\"\ntool=\"*\"\nverdict=\"allow\"\n",
    );
    let same = child("", &parent).unwrap();
    assert_eq!(
        (same.isolation(), same.limits(), same.budgets()),
        (parent.isolation(), parent.limits(), parent.budgets())
    );
    assert_eq!(verdict(&same, "shell", json!({})), (Verdict::Allow, "all".to_owned()));

    let narrow = child(
        "isolation = \"microvm\"\n[limits]\nmemory = \"512MiB\"\n[budgets]\ntokens = 10\nmodel_calls = 3\n\
         [[tools.rules]]\nname=\"rm\"\ntool=\"shell\"\nverdict=\"deny\"\nmatch={command='rm.*'}\n",
        &parent,
    )
    .unwrap();
    assert_eq!(
        (narrow.isolation(), narrow.limits().memory_bytes),
        (Isolation::Microvm, 512 << 20)
    );
    assert_eq!(
        (narrow.budgets().tokens, narrow.budgets().model_calls),
        (Some(10), Some(3))
    );
    assert_eq!(
        verdict(&narrow, "shell", json!({"command": "rm x"})),
        (Verdict::Deny, "rm".to_owned())
    );
    assert_eq!(
        verdict(&narrow, "shell", json!({"command": "ls"})),
        (Verdict::Allow, "all".to_owned())
    );

    let closed = child(
        "tools.default = \"deny\"\n[[tools.rules]]\nname=\"ro\"\ntool=\"read_file\"\nverdict=\"allow\"\n",
        &parent,
    )
    .unwrap();
    assert_eq!(verdict(&closed, "read_file", json!({"path": "a"})).0, Verdict::Allow);
    assert_eq!(verdict(&closed, "shell", json!({})).0, Verdict::Deny);
}

#[test]
fn every_widening_is_refused_with_both_values() {
    let parent = policy(
        "isolation = \"gvisor\"\nbackend = \"oci\"\nseccomp = \"strict\"\nlimits = { disk_kind = \"image\" }\nmounts = [{source=\"/srv/a\", target=\"/opt/a\"}]\n\
         [[tools.rules]]\nname=\"sh\"\ntool=\"shell\"\nverdict=\"ask\"\n[budgets]\ntokens = 1000\ncost_usd = 2\n",
    );
    let problems = child(
        r#"isolation = "container"
backend = "docker"
image = "docker:python"
seccomp = "default"
mounts = [{ source = "/srv/b", target = "/opt/a" }]

[limits]
cpus = 1.5
memory = "2GiB"
swap = "1MiB"
pids = 257
open_files = 5000
tmp = "1GiB"
tmp_inodes = 10001
shm = "65MiB"
disk = "5GiB"
disk_inodes = 200001
disk_kind = "tmpfs"
file_size = "3GiB"
wall_time = "2h"

[tools]
default = "ask"

[[tools.rules]]
name = "sh"
tool = ["shell", "read_file"]
verdict = "allow"

[budgets]
steps = 101
step_time = "3m"
total_time = "2h"
tokens = 1001
cost_usd = 2.5
parallel_tools = 5

[approvals]
expires = "2h"
"#,
        &parent,
    )
    .unwrap_err();
    insta::assert_snapshot!(problems.join("\n"));
}

#[test]
fn a_task_narrows_its_budgets() {
    let policy = policy("[budgets]\nsteps = 20\n");
    let wanted = BudgetOverrides {
        steps: Some(5),
        tokens: Some(7),
        ..BudgetOverrides::default()
    };
    let expected = Budgets {
        steps: Some(5),
        tokens: Some(7),
        ..Budgets::default()
    };
    assert_eq!(policy.narrow_budgets(&wanted), Ok(expected));
    let wider = BudgetOverrides {
        steps: Some(21),
        total_time: Some(Duration::from_secs(7200)),
        parallel_tools: Some(0),
        ..BudgetOverrides::default()
    };
    let problems: Vec<String> = policy
        .narrow_budgets(&wider)
        .unwrap_err()
        .iter()
        .map(Violation::to_string)
        .collect();
    assert_eq!(
        problems,
        [
            "budgets.steps: `21` is wider than `20` of policy `t`, and can only be narrower",
            "budgets.total_time: `2h` is wider than `1h` of policy `t`, and can only be narrower",
            "budgets.parallel_tools: must be more than 0: leave it out for the policy's own",
        ]
    );
}

/// Hostile input is bounded: refused, and without long work.
#[test]
fn hostile_files_are_refused() {
    let rule = |pattern: &str| {
        format!("{HEAD}[[tools.rules]]\nname=\"a\"\ntool=\"shell\"\nverdict=\"deny\"\nmatch={{command='{pattern}'}}\n")
    };
    let message = |text: &str| parse(text, None).unwrap_err()[0].message.clone();
    assert!(message(&rule("((a{100}){100}){100}")).contains("compiles to more than"));
    assert!(message(&rule(&"(".repeat(900))).contains("not a regular expression"));
    assert!(message(&rule(&"a".repeat(1001))).contains("at most 1000"));
    assert!(
        message(&rule("a)|(b")).contains("not a regular expression"),
        "brackets cannot leave the whole"
    );
    assert!(
        message(&rule("(?x)a # comment")).contains("not a regular expression"),
        "nor can a comment"
    );
    assert!(message(&format!("{HEAD}# {}", "x".repeat(300 << 10))).contains("at most 262144 are read"));
    assert!(message(&format!("{HEAD}a = {}", "[".repeat(5000))).contains("not TOML"));
    let many = (0..201).map(|n| format!("[[tools.rules]]\nname=\"r{n}\"\ntool=\"shell\"\nverdict=\"deny\"\n"));
    assert!(message(&format!("{HEAD}{}", many.collect::<String>())).contains("at most 200"));
    let unknown: String = (0..500).map(|n| format!("x{n} = 1\n")).collect();
    assert_eq!(parse(&format!("{HEAD}{unknown}"), None).unwrap_err().len(), 101);
}

#[test]
fn policies_are_found_by_name_and_by_path() {
    let data = tempfile::tempdir().unwrap();
    let directory = data.path().join("policies");
    std::fs::create_dir(&directory).unwrap();
    let write = |name: &str, text: &str| std::fs::write(directory.join(name), text).unwrap();
    write(
        "mine.toml",
        "format_version = 1\nname = \"mine\"\nextends = \"strict\"\n",
    );
    write(
        "near.toml",
        "format_version = 1\nname = \"near\"\nextends = \"./mine.toml\"\n[limits]\npids = 9\n",
    );
    write(
        "wide.toml",
        "format_version = 1\nname = \"wide\"\nextends = \"near\"\n[limits]\npids = 10\n",
    );
    write(
        "round.toml",
        "format_version = 1\nname = \"round\"\nextends = \"trip\"\n",
    );
    write(
        "trip.toml",
        "format_version = 1\nname = \"trip\"\nextends = \"round\"\n",
    );
    write(
        "orphan.toml",
        "format_version = 1\nname = \"orphan\"\nextends = \"nobody\"\npidz = 1\n",
    );
    let load = |name: &str| Policies::load(name, data.path());
    let fails = |name: &str| {
        load(name)
            .unwrap_err()
            .to_string()
            .replace(data.path().to_str().unwrap(), "DATA")
    };

    write("alias.toml", "format_version = 1\nname = \"mine\"\n");
    assert_eq!(load("near").unwrap().limits().pids, 9);
    let layers: Vec<String> = load("near")
        .unwrap()
        .layers()
        .iter()
        .map(|layer| layer.policy.clone())
        .collect();
    assert_eq!(layers, ["strict", "mine", "near"]);
    assert_eq!(
        load(directory.join("mine.toml").to_str().unwrap()).unwrap(),
        load("mine").unwrap()
    );
    insta::assert_snapshot!(
        [
            "alias",
            "wide",
            "round",
            "orphan",
            "nobody",
            "../policies/mine",
            "./no.toml",
            "../no-such-folder/no.toml"
        ]
        .map(fails)
        .join("\n")
    );

    // A name from outside is never a path.
    assert!(matches!(
        Policies::named("../policies/mine", data.path()),
        Err(Error::NotFound { .. })
    ));
    let names: Vec<String> = Policies::list(data.path())
        .unwrap()
        .into_iter()
        .map(|listed| listed.name)
        .collect();
    assert_eq!(
        names,
        [
            "alias",
            "default",
            "gvisor",
            "mine",
            "near",
            "network-build",
            "offline-build",
            "orphan",
            "round",
            "strict",
            "trip",
            "wide"
        ]
    );
    write("default.toml", "format_version = 1\nname = \"default\"\n");
    assert!(matches!(load("default"), Err(Error::Ambiguous(_))));
}

/// What the manual shows has to work.
#[test]
fn policies_in_the_manual_are_valid() {
    let manual = include_str!("../../../docs/policies.md");
    let blocks = manual
        .split("```toml\n")
        .skip(1)
        .filter_map(|rest| rest.split("```").next());
    let strict = built_in("strict");
    let policies: Vec<Policy> = blocks.map(|text| parse(text, Some(&strict)).unwrap()).collect();
    let [reviewers] = policies.as_slice() else {
        panic!("one example, not {}", policies.len());
    };
    let read = |path: &str| verdict(reviewers, "read_file", json!({ "path": path }));
    assert_eq!(read("certs/server.key"), (Verdict::Deny, "no-keys".to_owned()));
    assert_eq!(read("src/main.rs").0, Verdict::Allow);
    assert_eq!(read("/etc/passwd").0, Verdict::Deny, "the parent still speaks");
    assert_eq!(verdict(reviewers, "shell", json!({"command": "ls"})).0, Verdict::Deny);
    for tool in tools::ALL {
        let arguments: Vec<String> = tool
            .arguments
            .iter()
            .map(|argument| format!("`{}`", argument.name))
            .collect();
        let row = format!("| `{}` | {} |", tool.name, arguments.join(", "));
        assert!(manual.contains(&row), "the manual lacks {row}");
    }
}

//! What the commands print.

use std::path::PathBuf;

use super::*;

fn root(path: &str) -> String {
    format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))
}

fn nowhere() -> PathBuf {
    PathBuf::from("/nonexistent")
}

fn explained(policy: &str, tool: &str, arguments: &[&str]) -> String {
    let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
    explain(policy, tool, &arguments, &nowhere()).unwrap().2
}

#[test]
fn explain_names_verdict_rule_and_place() {
    let calls: &[(&str, &str, &[&str])] = &[
        ("default", "shell", &["rm -rf /"]),
        ("offline-build", "shell", &["make -j2"]),
        ("strict", "shell", &["rm -rf /"]),
        ("strict", "shell", &["git push origin main", "cwd=/workspace/a"]),
        ("strict", "shell", &["command=ls -l"]),
        ("strict", "shell", &["A=b env"]),
        ("strict", "read_file", &["/etc/passwd"]),
        ("strict", "write_file", &["path=.git/hooks/pre-commit", "content=x"]),
        ("strict", "search", &["TODO"]),
        ("strict", "finish", &[]),
    ];
    let answers = calls.iter().map(|(policy, tool, arguments)| {
        format!(
            "$ exuvia policy explain {policy} --tool {tool} {arguments:?}\n{}\n",
            explained(policy, tool, arguments)
        )
    });
    insta::assert_snapshot!(answers.collect::<Vec<_>>().join("\n"));
}

/// The place that is named is where the rule is.
#[test]
fn explain_points_into_the_file() {
    let (_, object, _) = explain("strict", "shell", &["rm -rf /".to_owned()], &nowhere()).unwrap();
    let source = object["source"].as_str().unwrap();
    let (file, line) = source.split_once(':').unwrap();
    let text = std::fs::read_to_string(root(file)).unwrap();
    let lines: Vec<&str> = text.lines().skip(line.parse::<usize>().unwrap() - 1).take(2).collect();
    assert_eq!(lines, ["[[tools.rules]]", "name = \"no-wiping\""]);
}

#[test]
fn explain_refuses_what_it_cannot_mean() {
    let fails = |tool: &str, arguments: &[&str]| {
        let arguments: Vec<String> = arguments.iter().map(|text| (*text).to_owned()).collect();
        let error = explain("default", tool, &arguments, &nowhere()).unwrap_err();
        (error.exit(), error.message)
    };
    assert_eq!(fails("bash", &["ls"]), (Exit::Usage, "no tool `bash`".to_owned()));
    assert_eq!(
        fails("shell", &["a", "b"]),
        (Exit::Usage, "argument `command` of `shell` is given twice".to_owned())
    );
}

#[test]
fn check_reports_all_problems_of_all_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).display().to_string();
    std::fs::write(
        path("bad.toml"),
        "format_version = 1\nname = \"bad\"\n[limits]\nmemry = \"1GiB\"\npids = 1\n",
    )
    .unwrap();
    std::fs::write(path("worse.toml"), "name = 7\n").unwrap();
    let good = root("policies/strict.toml");
    let run = |files: &[String]| {
        let (exit, object, text) = check(files, &nowhere());
        (
            exit,
            object,
            text.replace(directory.path().to_str().unwrap(), "DIR")
                .replace(&root(""), ""),
        )
    };
    let (exit, object, text) = run(&[good.clone(), path("bad.toml"), path("worse.toml")]);
    assert_eq!((exit, &object["valid"]), (Exit::Usage, &json!(false)));
    insta::assert_snapshot!(text);
    assert_eq!(
        object["files"][1]["violations"][0]["position"],
        json!({"line": 4, "column": 1})
    );
    assert_eq!(run(std::slice::from_ref(&good)).0, Exit::Ok);
    assert_eq!(run(&[good.clone(), path("missing.toml")]).0, Exit::Usage);
    assert_eq!(run(&[good.clone(), "nobody".to_owned()]).0, Exit::Refused);
    assert_eq!(run(&[good, path("bad.toml"), "nobody".to_owned()]).0, Exit::Usage);
}

#[test]
fn show_prints_what_is_in_force() {
    insta::assert_snapshot!(show(&Policies::load("strict", &nowhere()).unwrap()));
}

#[test]
fn list_names_the_built_in_ones() {
    let (exit, object, text) = list(&nowhere()).unwrap();
    assert_eq!(exit, Exit::Ok);
    insta::assert_snapshot!(text);
    let hash = Policies::load("default", &nowhere()).unwrap().hash().to_owned();
    assert_eq!(object["policies"][0]["hash"], json!(hash));
}

#[test]
fn list_counts_the_problems_of_a_policy_that_is_not_valid() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("policies")).unwrap();
    let file = dir.path().join("policies/mine.toml");
    for (body, told) in [
        ("foo = 1\n", "not valid: 1 problem"),
        ("foo = 1\nbar = 1\n", "not valid: 2 problems"),
    ] {
        std::fs::write(
            &file,
            format!("format_version = 1\nname = \"mine\"\nextends = \"default\"\n{body}"),
        )
        .unwrap();
        let (_, _, text) = list(dir.path()).unwrap();
        let line = text.lines().find(|line| line.starts_with("mine ")).unwrap();
        assert!(line.ends_with(told), "{line}");
    }
}

#[test]
fn the_command_line_parses() {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }
    let parse = |words: &[&str]| {
        <Cli as clap::Parser>::try_parse_from(std::iter::once(&"policy").chain(words)).map(|cli| cli.args)
    };
    assert!(matches!(
        parse(&["explain", "strict", "--tool", "shell", "--arg", "-rf", "--arg", "cwd=/"]).unwrap().command,
        Command::Explain { arguments, .. } if arguments == ["-rf", "cwd=/"]
    ));
    assert!(parse(&["check"]).is_err());
    assert!(matches!(parse(&["list"]).unwrap().command, Command::List));
}

#[test]
fn explain_tells_of_hosts_by_the_rules_of_the_border() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("net.toml").display().to_string();
    let text = "format_version = 1\nname = \"net\"\n[network]\nmode = \"proxy\"\npresets = [\"pypi\"]\n\
                [[network.allow]]\nname = \"api\"\nhost = \"api.example.com\"\n[[credentials]]\nname = \"token\"\n\
                from = \"env:TOKEN\"\nenv = \"API_TOKEN\"\ninject = { host = \"api.example.com\", path = \"/v1/\" }\n";
    std::fs::write(&path, text).unwrap();
    let asked: [(&str, Option<&str>); 6] = [
        ("api.example.com", None),
        ("api.example.com:80", None),
        ("api.example.com", Some("POST /v1/x")),
        ("api.example.com", Some("POST /v2/x")),
        ("pypi.org", Some("GET /simple/six/")),
        ("169.254.169.254:80", None),
    ];
    let answers = asked.map(|(host, request)| {
        let (_, _, text) = reach::explain(&path, host, request, &nowhere()).unwrap();
        format!(
            "$ --connect {host} {}\n{}\n",
            request.unwrap_or_default(),
            text.replace(&path, "net.toml")
        )
    });
    let shown = show(&Policies::load(&path, &nowhere()).unwrap()).replace(&path, "net.toml");
    insta::assert_snapshot!(answers.join("\n") + "\n" + &shown);
    let fails = |host: &str, request| reach::explain(&path, host, request, &nowhere()).unwrap_err().message;
    assert_eq!(fails("a.example:x", None), "`x` is no port");
    assert_eq!(fails("a.example", Some("GET")), "`GET` is not like `GET /path`");
}

//! Runs: the step's result says what was refused, and the record has run and step.

use std::process::Output;

use serde_json::Value;

use crate::bed::{Bed, SECRET, said, stdout};
use crate::lasting::{here, server};
use crate::support::script::Script;
use crate::support::transcript;

/// What a policy lacked is proposed from what was wanted, by exact names, methods and paths.
#[test]
fn learning_allows_no_more_and_proposes_what_was_wanted() {
    let Some(bed) = Bed::new("learning_allows_no_more_and_proposes_what_was_wanted") else {
        return;
    };
    let learning = std::fs::read_to_string(&bed.policy).unwrap();
    std::fs::write(&bed.policy, learning.replace("mode = \"proxy\"", "mode = \"learn\"")).unwrap();
    let script = Script::new()
        .shell(
            "curl -sS -X POST https://api.example.com/any/x; curl -sS https://other.example.com/closed; \
             curl -sS http://plain.example.com/p; curl -sS https://evil.example/; curl -sS https://metadata.example.com/; true",
        )
        .finish("done");
    let ran = play(&bed, &script);
    let object: Value = serde_json::from_str(stdout(&ran).lines().last().unwrap()).unwrap();
    assert_eq!(bed.internet.requests().len(), 2, "no more than the policy allows");
    let proposed = bed.exuvia(&["policy", "propose", object["run_id"].as_str().unwrap()]);
    let text = stdout(&{ proposed }.output().unwrap());
    let rules: Vec<&str> = text.split("[[network.allow]]\n").skip(1).map(str::trim).collect();
    assert_eq!(
        rules,
        [
            "host = \"api.example.com\"\nmethods = [\"POST\"]\npath = [\"/any/x\"]",
            "host = \"evil.example\"",
            "host = \"other.example.com\"\nmethods = [\"GET\"]\npath = [\"/closed\"]",
            "host = \"plain.example.com\"\nport = 80\nmethods = [\"GET\"]\npath = [\"/p\"]",
        ],
        "{text} {}",
        said(&ran)
    );
    assert!(text.contains("# 1 more were refused"), "{text}");
}

/// U2, T22: the model reads the rule that the program read, and the reviewer finds it under the same step.
#[test]
fn a_step_is_told_what_its_network_was_refused() {
    let Some(bed) = Bed::new("a_step_is_told_what_its_network_was_refused") else {
        return;
    };
    let script = Script::new()
        .shell("curl -sS -m 20 -H \"Authorization: Bearer $API_TOKEN\" https://api.example.com/v1/x | head -1")
        .shell("for n in 1 2; do curl -sS -m 20 https://evil.example/; done; curl -sS -X PUT https://other.example.com/open/x >/dev/null; true")
        .shell("echo quiet")
        .finish("done");
    let ran = play(&bed, &script);
    assert!(ran.status.success(), "{}", said(&ran));
    let object: Value = serde_json::from_str(stdout(&ran).lines().last().unwrap()).unwrap();
    let run = object["run_id"].as_str().unwrap();

    let decisions: Vec<Value> = bed
        .decisions()
        .into_iter()
        .filter(|one| one["details"]["channel"] == "connect")
        .collect();
    let told: Vec<(&str, &str, &str, &str)> = decisions
        .iter()
        .map(|one| {
            (
                text(&one["outcome"]),
                text(&one["details"]["rule"]),
                text(&one["ids"]["step"]),
                text(&one["ids"]["run"]),
            )
        })
        .collect();
    assert_eq!(
        told,
        [
            ("allowed", "api", "2", run),
            ("denied", "builtin:default-deny", "4", run),
            ("denied", "builtin:default-deny", "4", run),
            ("denied", "builtin:default-deny", "4", run),
        ],
        "{decisions:#?}"
    );

    let told = bed.exuvia(&["audit", "network", run]).output().unwrap();
    let told = stdout(&told);
    let lines: Vec<&str> = told.lines().filter(|line| !line.contains(" dns ")).collect();
    assert_eq!(lines.len(), 7, "{told}");
    assert!(
        lines[0].contains(" step 2 allowed connect api.example.com:443 GET /v1/x  (rule api, at "),
        "{told}"
    );
    assert!(
        lines[0].contains("status 200") && lines[0].contains("credential token"),
        "{told}"
    );
    assert!(
        lines[1].contains(" step 4 denied connect evil.example:443  (rule builtin:default-deny)"),
        "{told}"
    );
    assert!(lines[4].starts_with("in all: "), "{told}");
    assert_eq!(
        lines[5..],
        [
            "refused 2 x evil.example by builtin:default-deny",
            "refused 1 x other.example.com by builtin:default-deny"
        ]
    );
    let unknown = bed
        .exuvia(&["audit", "network", "run_aaaaaaaaaaaaaaaaaaaaaaaaaa"])
        .output()
        .unwrap();
    assert!(!unknown.status.success());

    let messages = here(async {
        let server = server(&bed, &[]).await;
        transcript(&mut server.client().await, run).await
    });
    assert!(!serde_json::to_string(&messages).unwrap().contains(SECRET));
    let answers = messages.iter().filter(|message| message["role"] == "tool");
    let results: Vec<Value> = answers
        .map(|answer| serde_json::from_str(answer["content"].as_str().unwrap()).unwrap())
        .collect();
    let networks: Vec<&Value> = results.iter().map(|result| &result["data"]["network"]).collect();
    assert_eq!(networks.len(), 4, "{results:#?}");
    assert!(
        networks[0].is_null() && networks[2].is_null() && networks[3].is_null(),
        "{networks:?}"
    );
    let refused = networks[1]["refused"].as_array().unwrap();
    assert_eq!(
        refused
            .iter()
            .map(|one| (one["host"].as_str().unwrap(), one["times"].as_u64().unwrap()))
            .collect::<Vec<_>>(),
        [("evil.example", 2), ("other.example.com", 1)]
    );
    assert!(networks[1]["how_to_ask"].as_str().unwrap().contains("network.allow"));
}

/// A run under the policy whose model plays this.
fn play(bed: &Bed, script: &Script) -> Output {
    let file = bed.data.path().join("script.jsonl");
    std::fs::write(&file, script.jsonl()).unwrap();
    let model = format!("scripted:{}", file.display());
    let words = [
        "run",
        "--json",
        "--prompt",
        "go",
        "--model",
        &model,
        "--policy",
        "net",
        "--empty-workspace",
    ];
    bed.exuvia(&words).output().unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

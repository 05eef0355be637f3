//! The recorded runs that the project keeps (`tests/fixtures/runs`, requirement T1): each is replayed on this build, and is
//! taken in by it. `EXUVIA_RECORD=1` makes those that are missing; one that is there is never made again, for what an older
//! build wrote is the point of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::Notify;

use super::{World, pause, resume, script, submission};
use crate::error::Kind;
use crate::ids::RunId;
use crate::run::Error;
use crate::run::driver::Rest;
use crate::run::event::Event;
use crate::run::recording::{self, Recording};
use crate::run::replay::replay;
use crate::run::service::Submission;
use crate::sandbox::backend::fake::Call;
use crate::store::memory::When;
use crate::store::{self, Signal, Store};

/// How a run of the collection comes about.
struct Scenario {
    name: &'static str,
    /// Rules on top of the default policy.
    rules: &'static str,
    submission: Submission,
    crashes: Vec<(u64, When)>,
    /// Calls of the backend that fail in the first process.
    failures: Vec<Call>,
    /// Sent once the journal is that long, or the run waits.
    signals: Vec<(u64, Signal)>,
}

const ASK: &str = "[[tools.rules]]\nname = \"ask-shell\"\ntool = \"shell\"\nverdict = \"ask\"\n";
const DENY: &str =
    "[[tools.rules]]\nname = \"no-shell\"\ntool = \"shell\"\nverdict = \"deny\"\nreason = \"not in this house\"\n";

fn write(path: &str) -> (&'static str, Value) {
    ("write_file", json!({ "path": path, "content": "1\n" }))
}

fn shell(command: &str) -> (&'static str, Value) {
    ("shell", json!({ "command": command }))
}

fn finish() -> (&'static str, Value) {
    ("finish", json!({ "summary": "done" }))
}

fn decide(approved: bool) -> Signal {
    Signal::Decide {
        approval: None,
        approved,
        by: "ann".into(),
        reason: "looked at it".into(),
    }
}

fn plain(name: &'static str, turns: &[&[(&str, Value)]]) -> Scenario {
    Scenario {
        name,
        rules: "",
        submission: submission(script(turns)),
        crashes: vec![],
        failures: vec![],
        signals: vec![],
    }
}

fn text(name: &'static str, lines: &[Value]) -> Scenario {
    let jsonl = lines.iter().map(|line| format!("{line}\n")).collect();
    Scenario {
        submission: submission(jsonl),
        ..plain(name, &[])
    }
}

fn scenarios() -> Vec<Scenario> {
    let short: &[&[(&str, Value)]] = &[&[write("a")], &[shell("cat a; echo 2 >> a")], &[finish()]];
    let checked = |scenario: Scenario, check: &str| Scenario {
        submission: Submission {
            check: Some(check.into()),
            ..scenario.submission
        },
        ..scenario
    };
    let limited = |scenario: Scenario, limit: fn(&mut crate::policy::BudgetOverrides)| {
        let mut scenario = scenario;
        limit(&mut scenario.submission.budgets);
        scenario
    };
    let cancel = Signal::Cancel {
        by: "ann".into(),
        reason: "enough".into(),
    };
    let pause_now = Signal::Pause {
        by: "ann".into(),
        reason: String::new(),
        now: true,
    };
    let slow: &[&[(&str, Value)]] = &[&[write("a")], &[shell("sleep 50; echo 2 >> a")], &[finish()]];
    vec![
        plain("success", short),
        text("last-word-without-a-call", &[json!({ "content": "It is done." })]),
        plain(
            "parallel-readers",
            &[
                &[write("a")],
                &[
                    ("read_file", json!({ "path": "a" })),
                    ("list_files", json!({})),
                    ("search", json!({ "pattern": "1" })),
                ],
                &[finish()],
            ],
        ),
        plain(
            "writers-one-after-the-other",
            &[&[write("a"), write("b"), shell("cat a b > c")], &[finish()]],
        ),
        plain("unknown-tool", &[&[("nonsense", json!({}))], &[finish()]]),
        plain("bad-arguments", &[&[("shell", json!({ "cmd": "ls" }))], &[finish()]]),
        plain("failing-command", &[&[shell("exit 3")], &[finish()]]),
        plain(
            "tool-time-out",
            &[
                &[("shell", json!({ "command": "sleep 60", "timeout_s": 2 }))],
                &[finish()],
            ],
        ),
        plain(
            "failed-edit",
            &[
                &[write("a")],
                &[("edit_file", json!({ "path": "a", "old": "nowhere", "new": "x" }))],
                &[finish()],
            ],
        ),
        plain(
            "read-of-what-is-not-there",
            &[&[("read_file", json!({ "path": "missing" }))], &[finish()]],
        ),
        Scenario {
            rules: DENY,
            ..plain("denied", short)
        },
        Scenario {
            rules: ASK,
            signals: vec![(1, decide(true))],
            ..plain("approved", short)
        },
        Scenario {
            rules: ASK,
            signals: vec![(1, decide(false))],
            ..plain("approval-denied", short)
        },
        checked(
            plain(
                "check-fails-then-passes",
                &[&[finish()], &[shell("echo x > done")], &[finish()]],
            ),
            "test -f done",
        ),
        limited(plain("budget-of-steps", short), |budgets| budgets.steps = Some(3)),
        limited(plain("budget-of-model-calls", short), |budgets| {
            budgets.model_calls = Some(2)
        }),
        limited(
            text(
                "budget-of-tokens",
                &[
                    json!({ "tool_calls": [{ "function": { "name": "list_files", "arguments": {} } }],
                    "usage": { "input_tokens": 900, "output_tokens": 200 } }),
                    json!({ "content": "done" }),
                ],
            ),
            |budgets| budgets.tokens = Some(1000),
        ),
        limited(
            plain(
                "budget-of-time",
                &[&[shell("sleep 50")], &[shell("sleep 50")], &[finish()]],
            ),
            |budgets| budgets.total_time = Some(Duration::from_secs(60)),
        ),
        limited(
            text(
                "model-never-answers",
                &[json!({ "content": "late", "delay_ms": 3_600_000 })],
            ),
            |budgets| budgets.step_time = Some(Duration::from_secs(10)),
        ),
        plain("script-ends-early", &[&[write("a")]]),
        text(
            "empty-answers",
            &[
                json!({ "content": "" }),
                json!({ "content": " " }),
                json!({ "content": "" }),
            ],
        ),
        Scenario {
            failures: vec![Call::Create, Call::Start],
            ..plain("sandbox-lost-and-tried-again", short)
        },
        Scenario {
            failures: vec![Call::Create, Call::Create, Call::Create],
            ..plain("sandbox-never-comes", short)
        },
        Scenario {
            failures: vec![Call::Create; 20],
            ..plain("sandbox-never-comes-for-minutes", short)
        },
        Scenario {
            crashes: vec![(3, When::After), (6, When::Before), (9, When::After)],
            ..plain("crashes", short)
        },
        Scenario {
            crashes: (1..60).filter(|n| n % 3 == 0).map(|n| (n, When::After)).collect(),
            ..plain("a-crash-at-every-third-commit", short)
        },
        Scenario {
            signals: vec![(7, cancel.clone())],
            ..plain("cancelled-in-a-tool", slow)
        },
        Scenario {
            rules: ASK,
            signals: vec![(1, cancel)],
            ..plain("cancelled-while-it-waits", short)
        },
        Scenario {
            signals: vec![(3, pause()), (4, resume())],
            ..plain("paused-and-resumed", short)
        },
        Scenario {
            signals: vec![(7, pause_now), (8, resume())],
            ..plain("paused-at-once", slow)
        },
    ]
}

/// Runs a scenario to its end.
async fn record(scenario: Scenario) -> (World, RunId) {
    let world = World::new();
    let folder = world.data.path().join("policies");
    std::fs::create_dir_all(&folder).unwrap();
    let head = "format_version = 1\nname = \"recorded\"\nextends = \"default\"\n";
    std::fs::write(folder.join("recorded.toml"), format!("{head}{}", scenario.rules)).unwrap();
    let policy = "recorded".into();
    let run = world
        .submit(Submission {
            policy,
            ..scenario.submission
        })
        .await;
    for (nth, when) in scenario.crashes {
        world.store.fail_at(nth, when);
    }
    let mut signals = scenario.signals.into_iter().collect::<std::collections::VecDeque<_>>();
    let mut failures = scenario.failures;
    for _ in 0..100 {
        let process = world.process();
        failures
            .drain(..)
            .for_each(|call| process.fake.fail_next(call, "no such luck"));
        let wake = Arc::new(Notify::new());
        let mut moved = process.shop.hub.subscribe(&run);
        let meddle = async {
            while signals.front().is_some_and(|(at, _)| *at > 1) {
                if world.store.run(&run).await.unwrap().seq >= signals[0].0 {
                    // What is going on has begun, but is not over.
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    send(&world, &run, signals.pop_front().unwrap().1).await;
                    wake.notify_one();
                } else if moved.changed().await.is_err() {
                    break;
                }
            }
            std::future::pending::<()>().await;
        };
        let driven = tokio::select! {
            driven = process.drive_with(&run, Arc::clone(&wake)) => driven,
            () = meddle => unreachable!("it waits for ever"),
        };
        match driven {
            Ok(Rest::Ended) | Err(Error::Store(store::Error::Ended { .. })) => return (world, run),
            Ok(Rest::Parked) => {
                // Idle: nothing is held, by anybody (the driver has let go of its sandbox).
                let (_, signal) = signals.pop_front().expect("somebody lets it go on");
                send(&world, &run, signal).await;
            }
            Ok(rest @ (Rest::Released | Rest::Waiting(_))) => panic!("{rest:?}: nobody stopped it"),
            Err(Error::Store(store::Error::Backend { .. })) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
    panic!("it never ends");
}

async fn send(world: &World, run: &RunId, signal: Signal) {
    match world.store.signal(run, signal).await {
        Ok(()) | Err(store::Error::Ended { .. }) => {}
        Err(error) => panic!("{error:?}"),
    }
}

async fn recording(world: &World, run: &RunId) -> Recording {
    let record = world.store.run(run).await.unwrap();
    Recording::of(&world.store, &record).await.unwrap()
}

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/runs")
}

/// The files that are there, by name.
fn kept() -> BTreeMap<String, String> {
    let files = std::fs::read_dir(folder()).into_iter().flatten();
    files
        .map(|file| file.unwrap().path())
        .filter(|path| path.extension().is_some_and(|end| end == "jsonl"))
        .map(|path| {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read_to_string(path).unwrap())
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn t1_each_scenario_replays_to_the_same_and_is_kept() {
    let may_record = std::env::var_os("EXUVIA_RECORD").is_some();
    let mut missing = Vec::new();
    for scenario in scenarios() {
        let name = scenario.name;
        let (world, run) = record(scenario).await;
        let recording = recording(&world, &run).await;
        let text = recording.to_text();
        assert_eq!(Recording::parse(&text).unwrap(), recording, "{name}");
        assert_eq!(replay(&recording).unwrap(), None, "{name}");
        let path = folder().join(format!("{name}.jsonl"));
        if !path.exists() && may_record {
            std::fs::create_dir_all(folder()).unwrap();
            std::fs::write(&path, text).unwrap();
        } else if !path.exists() {
            missing.push(name);
        }
    }
    assert_eq!(missing, Vec::<&str>::new(), "make them with EXUVIA_RECORD=1");
}

#[test]
fn t1_f2_what_older_builds_recorded_replays_to_the_same() {
    let kept = kept();
    assert!(kept.len() >= 20, "{} recordings", kept.len());
    for (name, text) in kept {
        let recording = Recording::parse(&text).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(replay(&recording).unwrap(), None, "{name}");
    }
}

/// E14, T1: a record that today's machine would not make is found, at the place where it first differs.
#[test]
fn e14_a_changed_record_diverges_where_it_was_changed() {
    let recording = Recording::parse(&kept()["success"]).unwrap();
    let edit = |edit: &dyn Fn(&mut Recording)| {
        let mut changed = recording.clone();
        edit(&mut changed);
        let found = replay(&changed).unwrap().expect("it was changed");
        (found.seq, found.event, found.at)
    };
    let place = |wanted: fn(&Event) -> bool| recording.entries.iter().position(|entry| wanted(&entry.event)).unwrap();
    let replied = place(|event| matches!(event, Event::ModelReplied { .. }));
    let started = place(|event| matches!(event, Event::ToolStarted { .. }));

    let found = edit(&|recording| {
        if let Event::ModelReplied { calls, .. } = &mut recording.entries[replied].event {
            calls[0].effect = crate::tool::Effect::External;
        }
    });
    assert_eq!(
        found,
        (replied as u64 + 1, "model_replied".into(), "calls.0.effect".into())
    );

    let found = edit(&|recording| {
        if let Event::ToolStarted { decision, .. } = &mut recording.entries[started].event {
            decision.rule = "another".into();
        }
    });
    assert_eq!(
        found,
        (started as u64 + 1, "tool_started".into(), "decision.rule".into())
    );

    // An altered reply: what follows it is no longer what today's machine does.
    let found = edit(&|recording| {
        if let Event::ModelReplied { calls, .. } = &mut recording.entries[replied].event {
            calls[0].tool = "nonsense".into();
            calls[0].effect = crate::tool::Effect::ReadOnly;
        }
    });
    assert_eq!(found.0, replied as u64 + 1);
    assert!(found.2.starts_with("checkpoint.phase.calls.0"), "{}", found.2);

    let found = edit(&|recording| recording.checkpoints[1].state["next_step"] = json!(99));
    assert_eq!(
        found,
        (
            replied as u64 + 1,
            "model_replied".into(),
            "checkpoint.next_step".into()
        )
    );
}

#[tokio::test(start_paused = true)]
async fn f2_a_recording_of_another_version_or_out_of_order_is_refused_by_name() {
    let (world, run) = record(plain("success", &[&[finish()]])).await;
    let text = recording(&world, &run).await.to_text();
    let newer = text.replacen("\"format_version\":1", "\"format_version\":2", 1);
    let error = Recording::parse(&newer).unwrap_err();
    assert!(
        matches!(error, recording::Error::UnknownVersion { found: 2 }),
        "{error:?}"
    );
    assert_eq!(error.kind(), Kind::WrongState);
    let mut lines: Vec<&str> = text.lines().collect();
    lines.remove(1);
    let error = Recording::parse(&lines.join("\n")).unwrap_err();
    assert!(
        matches!(
            error,
            recording::Error::Order { line: 2, .. } | recording::Error::Order { line: 3, .. }
        ),
        "{error:?}"
    );
    assert!(matches!(Recording::parse(""), Err(recording::Error::Empty)));
}

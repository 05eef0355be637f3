//! A kill at each named moment of a tool call, for each class of tool (requirements D5, D6, D7, E11, S1, S2). What is outside of
//! the sandbox is a pipe of the host's that commands write their idempotency key into; who reads it counts.
//!
//! Lost is nothing, ever. A tool of the sandbox leaves no trace twice. One that takes the key is called again, and its other side
//! does the work once. Any other is called again only after somebody was asked.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use exuvia::api::proto::event::Kind;
use exuvia::api::proto::{self, RunState};
use exuvia::chaos::Moment;
use nix::sys::stat::Mode;

use crate::journey::{Journey, nothing_is_left};
use crate::support::host::sandboxes;
use crate::support::script::Script;
use crate::support::server::Server;
use crate::support::watch::{kind, until, until_end};
use crate::support::{Client, Scratch, get, has_sandboxes, keyed, transcript};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Class {
    /// Touches nothing but its workspace.
    Sandboxed,
    /// Hands the step's key on.
    Keyed,
    External,
}

/// The only tool call that does anything; the model's first turn is step 1.
const STEP: u32 = 2;

impl Class {
    fn policy(self) -> String {
        let effect = match self {
            Self::Sandboxed => "",
            Self::Keyed => "effect = \"idempotent\"\n",
            Self::External => "effect = \"external\"\n",
        };
        format!(
            "format_version = 1\nname = \"reaching\"\n[[tools.rules]]\nname = \"all\"\ntool = \"*\"\nverdict = \"allow\"\n\
             [[tools.rules]]\nname = \"out\"\ntool = \"shell\"\nverdict = \"allow\"\n{effect}"
        )
    }

    fn task(self) -> proto::Task {
        let command = match self {
            Self::Sandboxed => "echo once >> log",
            Self::Keyed | Self::External => "echo $EXUVIA_IDEMPOTENCY_KEY > /outside/pipe; echo once >> log",
        };
        proto::Task {
            policy: "reaching".into(),
            ..Script::new().shell(command).shell("cat log").finish("done").task()
        }
    }
}

/// The world outside, which remembers how often it was called by each key.
struct Outside {
    directory: Scratch,
    /// Both ends: it never ends, and nobody waits for a reader.
    pipe: File,
}

impl Outside {
    fn new() -> Self {
        let directory = Scratch::new();
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let path = directory.path().join("pipe");
        nix::unistd::mkfifo(&path, Mode::S_IRWXU).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        let pipe = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(nix::libc::O_NONBLOCK)
            .open(path)
            .unwrap();
        Self { directory, pipe }
    }

    /// The calls that have come so far, by key.
    fn calls(&mut self, known: &mut BTreeMap<String, u32>) {
        let mut text = [0; 4096];
        while let Ok(got @ 1..) = self.pipe.read(&mut text) {
            for key in std::str::from_utf8(&text[..got]).unwrap().lines() {
                *known.entry(key.to_owned()).or_default() += 1;
            }
        }
    }
}

async fn killed(class: Class, moment: Moment) {
    let name = format!("{class:?} {}", moment.name());
    if !has_sandboxes(&name) {
        return;
    }
    let data = Scratch::new();
    let mut outside = Outside::new();
    write_policy(data.path(), &outside, class);

    let at = format!("{}:{STEP}", moment.name());
    let server = Server::start_with(data.path(), &[("EXUVIA_KILL_AT", &at)])
        .await
        .unwrap();
    let _ = server.client().await.submit(keyed("moment", &class.task())).await;
    server.dies().await;
    let seen = sandboxes(data.path());
    let mut calls = BTreeMap::new();
    outside.calls(&mut calls);
    let before: u32 = calls.values().sum();

    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let submitted = client.submit(keyed("moment", &class.task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    let asked = settle(&mut client, &run, before == 0).await;
    let events = until_end(&mut client, &run, 0).await;
    let now = client.get(get(&run)).await.unwrap().into_inner();
    let said = transcript(&mut client, &run).await;
    let journey = Journey::of(now, events, said);
    outside.calls(&mut calls);

    assert_eq!(journey.result.state, RunState::Finished, "{name}");
    let keys: Vec<(String, u32)> = calls.into_iter().collect();
    let in_doubt = class == Class::External && matches!(moment, Moment::AfterIntent | Moment::AfterEffect);
    assert_eq!(
        asked,
        u32::from(in_doubt),
        "{name}: a person is asked where nobody can know, and only there"
    );
    match class {
        Class::Sandboxed => assert_eq!(keys, []),
        Class::Keyed => {
            let again = u32::from(moment == Moment::AfterEffect);
            let [(key, times)] = keys.as_slice() else {
                panic!("{name}: {keys:?}")
            };
            assert!(key.ends_with("/2"), "B5: {key}");
            // Its other side sees the same key, and does the work once.
            assert_eq!(*times, 1 + again, "{name}");
        }
        // Whoever was asked had looked: lost 0, doubled 0.
        Class::External => assert_eq!(keys.iter().map(|(_, times)| *times).collect::<Vec<_>>(), [1], "{name}"),
    }
    // The workspace has it once, or not at all where the model was told that it is not known.
    let log = second_result(&journey);
    let left_alone = in_doubt && before > 0;
    assert_eq!(log.contains("once"), !left_alone, "{name}: {log}");
    assert!(!log.contains("once\\\\nonce"), "{name}: {log}");
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}

/// Answers for somebody who has looked outside: call it again where it has not come. Gives how often somebody was asked.
async fn settle(client: &mut Client, run: &str, again: bool) -> u32 {
    let asks = |event: &proto::Event| matches!(kind(event), Kind::OutcomeUnknown(_));
    let events = until(client, run, 0, asks).await;
    let Some(Kind::OutcomeUnknown(unknown)) = events.last().map(kind) else {
        return 0;
    };
    assert_eq!(unknown.step, STEP);
    let request = proto::DecideRequest {
        id: run.to_owned(),
        approval: unknown.approval_id.clone(),
        approved: again,
        by: "tester".into(),
        reason: "looked".into(),
    };
    client.decide(request).await.unwrap();
    1
}

/// What `cat log` said.
fn second_result(journey: &Journey) -> String {
    let said = &journey.result.transcript;
    let results = said.iter().filter(|message| message["role"] == "tool");
    results
        .filter_map(|message| message["content"].as_str())
        .nth(1)
        .unwrap_or_default()
        .to_owned()
}

macro_rules! moments {
    ($($name:ident: $class:ident, $moment:ident;)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                killed(Class::$class, Moment::$moment).await;
            }
        )*
    };
}

moments! {
    e11_sandboxed_before_intent: Sandboxed, BeforeIntent;
    e11_sandboxed_after_intent: Sandboxed, AfterIntent;
    e11_sandboxed_after_effect: Sandboxed, AfterEffect;
    e11_sandboxed_after_outcome: Sandboxed, AfterOutcome;
    e11_sandboxed_after_checkpoint: Sandboxed, AfterCheckpoint;
    s1_keyed_before_intent: Keyed, BeforeIntent;
    s1_keyed_after_intent: Keyed, AfterIntent;
    s1_keyed_after_effect: Keyed, AfterEffect;
    s1_keyed_after_outcome: Keyed, AfterOutcome;
    s1_keyed_after_checkpoint: Keyed, AfterCheckpoint;
    d5_external_before_intent: External, BeforeIntent;
    d5_external_after_intent: External, AfterIntent;
    d5_external_after_effect: External, AfterEffect;
    d5_external_after_outcome: External, AfterOutcome;
    d5_external_after_checkpoint: External, AfterCheckpoint;
}

/// D6: whoever was asked and says yes without having looked has it twice, and the journal says that it was asked: never silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn s2_what_happens_twice_was_flagged() {
    if !has_sandboxes("s2_what_happens_twice_was_flagged") {
        return;
    }
    let data = Scratch::new();
    let mut outside = Outside::new();
    write_policy(data.path(), &outside, Class::External);
    let at = format!("{}:{STEP}", Moment::AfterEffect.name());
    let server = Server::start_with(data.path(), &[("EXUVIA_KILL_AT", &at)])
        .await
        .unwrap();
    let _ = server
        .client()
        .await
        .submit(keyed("moment", &Class::External.task()))
        .await;
    server.dies().await;
    let seen = sandboxes(data.path());
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let submitted = client.submit(keyed("moment", &Class::External.task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    assert_eq!(settle(&mut client, &run, true).await, 1);
    until_end(&mut client, &run, 0).await;
    let mut calls = BTreeMap::new();
    outside.calls(&mut calls);
    assert_eq!(calls.into_values().collect::<Vec<_>>(), [2], "the same key both times");
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}

fn write_policy(data: &Path, outside: &Outside, class: Class) {
    let policies = data.join("policies");
    fs::create_dir(&policies).unwrap();
    let mount = format!(
        "[[mounts]]\nsource = \"{}\"\ntarget = \"/outside\"\n",
        outside.directory.path().display()
    );
    fs::write(policies.join("reaching.toml"), class.policy() + &mount).unwrap();
}

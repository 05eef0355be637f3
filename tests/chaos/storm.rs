//! The storm (requirement X1): runs of the project side by side on one server, and SIGKILL at random instants of the server, of
//! guests, of the forge and what it forks, and a database that another process holds for longer than anybody waits. Each run ends
//! with the transcript and the workspace of the run that nobody disturbed.
//!
//! `EXUVIA_CHAOS_KILLS=200` is the long form; `EXUVIA_SEED=n` chooses the same blows again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use exuvia::api::proto;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::task::JoinSet;

use crate::journey::{Journey, nothing_is_left, travel_as};
use crate::project;
use crate::random::Random;
use crate::support::host::{children, init_of, sandboxes};
use crate::support::server::{LONG, Server};
use crate::support::{Client, Scratch, get, has_sandboxes, keyed, skip};

/// Runs that go on side by side.
const ABREAST: usize = 4;
/// A write waits so long for another process's transaction; and how long one is held.
const BUSY: [(&str, &str); 1] = [("EXUVIA_STORE_BUSY_MS", "150")];
const HELD: Duration = Duration::from_millis(400);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Server,
    Guest,
    Forge,
    Database,
}

impl Victim {
    fn draw(random: &mut Random) -> Self {
        match random.below(10) {
            0..=3 => Self::Server,
            4..=6 => Self::Guest,
            7..=8 => Self::Forge,
            _ => Self::Database,
        }
    }
}

/// Where the server is now; another place after each of its deaths.
type Place = Arc<Mutex<String>>;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_runs_in_a_storm_of_kills_end_as_if_nothing_had_been() {
    const NAME: &str = "x1_runs_in_a_storm_of_kills_end_as_if_nothing_had_been";
    if !has_sandboxes(NAME) {
        return;
    }
    if !project::has_compiler() {
        return skip(NAME, &"no cc or make in /usr/bin");
    }
    let kills = std::env::var("EXUVIA_CHAOS_KILLS").map_or(50, |text| text.parse().unwrap());
    let mut random = Random::new();
    let data = Scratch::new();
    let server = Server::start_with(data.path(), &BUSY).await.unwrap();
    let expected = travel_as(&mut server.client().await, "undisturbed", &project::task()).await;
    assert_eq!(
        expected.result.state,
        proto::RunState::Finished,
        "{}",
        expected.result.summary
    );
    assert_eq!(
        (expected.claims, expected.result.steps),
        (1, 61),
        "30 tool calls in 29 turns, and the end"
    );

    let place: Place = Arc::new(Mutex::new(server.url()));
    let mut runs = JoinSet::new();
    let mut begun = 0;
    let mut storm = Storm {
        data: data.path(),
        server: Some(server),
        place: &place,
        seen: BTreeSet::new(),
        blows: BTreeMap::new(),
    };
    let mut ended = Vec::new();
    while storm.blows.values().sum::<u32>() < kills || !runs.is_empty() {
        let calm = storm.blows.values().sum::<u32>() >= kills;
        while !calm && runs.len() < ABREAST {
            runs.spawn(persist(Arc::clone(&place), format!("storm-{begun}")));
            begun += 1;
        }
        tokio::select! {
            Some(run) = runs.join_next() => ended.push(run.unwrap()),
            () = tokio::time::sleep(Duration::from_millis(random.below(400))), if !calm => storm.strike(&mut random).await,
        }
    }
    let claims: usize = ended.iter().map(|journey: &Journey| journey.claims).sum();
    eprintln!("{} runs, {claims} claims, blows: {:?}", ended.len(), storm.blows);
    for journey in &ended {
        assert_eq!(journey.result, expected.result, "{}", journey.run);
    }
    assert!(claims > ended.len() && storm.blows.len() == 4, "it was a storm");
    let seen: Vec<String> = storm.seen.iter().cloned().collect();
    storm.server.take().unwrap().terminate().await;
    nothing_is_left(data.path(), &seen);
}

struct Storm<'a> {
    data: &'a Path,
    server: Option<Server>,
    place: &'a Place,
    seen: BTreeSet<String>,
    blows: BTreeMap<Victim, u32>,
}

impl Storm<'_> {
    /// One blow; none where its victim is not there just now.
    async fn strike(&mut self, random: &mut Random) {
        let there = sandboxes(self.data);
        self.seen.extend(there.iter().cloned());
        let victim = Victim::draw(random);
        let struck = match victim {
            Victim::Server => {
                self.server.take().unwrap().kill().await;
                self.seen.extend(sandboxes(self.data));
                let server = Server::start_with(self.data, &BUSY).await.unwrap();
                *self.place.lock().unwrap() = server.url();
                self.server = Some(server);
                true
            }
            Victim::Guest => {
                let inits: Vec<i32> = there.iter().filter_map(|name| init_of(name)).collect();
                dies(one_of(&inits, random))
            }
            Victim::Forge => {
                let server = self.server.as_ref().unwrap().pid();
                let forge = children(server.as_raw());
                // Itself, or the process that is just being made into a sandbox.
                let family: Vec<i32> = forge
                    .iter()
                    .flat_map(|pid| [vec![*pid], children(*pid)].concat())
                    .collect();
                dies(one_of(&family, random))
            }
            Victim::Database => hold(self.data).await,
        };
        if struck {
            *self.blows.entry(victim).or_default() += 1;
        }
    }
}

fn one_of(pids: &[i32], random: &mut Random) -> Option<i32> {
    (!pids.is_empty()).then(|| pids[random.below(pids.len() as u64) as usize])
}

fn dies(pid: Option<i32>) -> bool {
    pid.is_some_and(|pid| kill(Pid::from_raw(pid), Signal::SIGKILL).is_ok())
}

/// Another process's transaction that does not end; `false` where none could be begun.
async fn hold(data: &Path) -> bool {
    let path = data.join("exuvia.db");
    let held = tokio::task::spawn_blocking(move || {
        let db = rusqlite::Connection::open(path).unwrap();
        db.busy_timeout(Duration::from_secs(5)).unwrap();
        let begun = db.execute_batch("BEGIN IMMEDIATE").is_ok();
        std::thread::sleep(HELD);
        begun
    });
    held.await.unwrap()
}

/// Submits a run and follows it to its end over as many servers as it takes, as a client would that is told to.
async fn persist(place: Place, key: String) -> Journey {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < 10 * LONG, "{key} ends");
        let url = place.lock().unwrap().clone();
        if let Ok(client) = Client::connect(url).await
            && let Some(journey) = follow(client, &key).await
        {
            return journey;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// `None` where the server went away.
async fn follow(mut client: Client, key: &str) -> Option<Journey> {
    let run = client
        .submit(keyed(key, &project::task()))
        .await
        .ok()?
        .into_inner()
        .run_id;
    let request = proto::WatchRequest {
        id: run.clone(),
        after_seq: 0,
    };
    let mut stream = client.watch(request).await.ok()?.into_inner();
    let mut events = Vec::new();
    while let Some(event) = stream.message().await.ok()? {
        events.push(event);
    }
    let last = events.last().and_then(|event| event.kind.as_ref());
    matches!(last, Some(proto::event::Kind::Ended(_))).then_some(())?;
    let now = client.get(get(&run)).await.ok()?.into_inner();
    let request = proto::GetTranscriptRequest { id: run };
    let said = client.get_transcript(request).await.ok()?.into_inner().messages;
    let said = said.iter().map(exuvia::api::convert::struct_from_proto).collect();
    Some(Journey::of(now, events, said))
}

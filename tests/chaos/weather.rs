//! What happens to a server from around it (requirement X1): a clock that is set by a day, a store that answers late, or fails after
//! it has written, a disk that is full for a while, a process of the user's that somebody kills.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use exuvia::api::proto::RunState;
use exuvia::api::proto::event::Kind;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::journey::{nothing_is_left, travel_as};
use crate::outages::slow;
use crate::project;
use crate::random::Random;
use crate::support::host::{init_of, processes, sandboxes};
use crate::support::server::{LONG, Server};
use crate::support::watch::{kind, until};
use crate::support::{Scratch, get, has_sandboxes, keyed, skip, transcript};

fn can_run(name: &str) -> bool {
    if !has_sandboxes(name) {
        return false;
    }
    if !project::has_compiler() {
        skip(name, &"no cc or make in /usr/bin");
    }
    project::has_compiler()
}

/// The clock is set while the run goes on, and set back again (by a new server) while it does.
async fn by_a_day(name: &str, jump: &str) {
    if !can_run(name) {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let expected = travel_as(&mut server.client().await, "undisturbed", &project::task()).await;
    server.terminate().await;

    let server = Server::start_with(data.path(), &[("EXUVIA_CLOCK_JUMP", jump)])
        .await
        .unwrap();
    let mut client = server.client().await;
    let submitted = client.submit(keyed("jump", &project::task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    // Some steps later than the jump.
    until(&mut client, &run, 0, |event| event.seq >= 60).await;
    let seen = sandboxes(data.path());
    server.kill().await;
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let journey = travel_as(&mut client, "jump", &project::task()).await;
    assert_eq!(journey.result, expected.result, "{jump}");
    assert_eq!(journey.claims, 2);
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_a_clock_that_is_set_forward_by_a_day_changes_nothing() {
    by_a_day("x1_a_clock_that_is_set_forward_by_a_day_changes_nothing", "86400@300").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_a_clock_that_is_set_back_by_a_day_changes_nothing() {
    by_a_day("x1_a_clock_that_is_set_back_by_a_day_changes_nothing", "-86400@300").await;
}

/// E12, S1: late, refused, and done but not answered, on the real store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn e12_a_store_that_fails_after_it_has_written_changes_nothing() {
    const NAME: &str = "e12_a_store_that_fails_after_it_has_written_changes_nothing";
    if !can_run(NAME) {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let expected = travel_as(&mut server.client().await, "undisturbed", &project::task()).await;
    server.terminate().await;
    let faults = format!("{}:40", Random::new().below(1 << 32));
    eprintln!("EXUVIA_STORE_FAULTS={faults}");
    let server = Server::start_with(data.path(), &[("EXUVIA_STORE_FAULTS", &faults)])
        .await
        .unwrap();
    let mut runs = tokio::task::JoinSet::new();
    for n in 0..3 {
        let mut client = server.client().await;
        runs.spawn(async move {
            let key = format!("faults-{n}");
            // The answer to the submission may be lost as well; the same key finds it again.
            while client.submit(keyed(&key, &project::task())).await.is_err() {}
            loop {
                if client.submit(keyed(&key, &project::task())).await.is_ok() {
                    break travel_as(&mut client, &key, &project::task()).await;
                }
            }
        });
    }
    let mut claims = 0;
    while let Some(journey) = runs.join_next().await {
        let journey = journey.unwrap();
        assert_eq!(journey.result, expected.result);
        claims += journey.claims;
    }
    assert!(claims > 3, "the store did fail");
    let seen = sandboxes(data.path());
    server.terminate().await;
    nothing_is_left(data.path(), &seen);
}

/// A file system of its own, gone with the test.
struct Small(Scratch);

impl Small {
    fn new(bytes: u64) -> nix::Result<Self> {
        let place = Scratch::new();
        let options = format!("size={bytes}");
        mount(
            Some("tmpfs"),
            place.path(),
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )?;
        Ok(Self(place))
    }

    /// Takes all that is left, as far as a byte.
    fn fill(&self) {
        let mut file = File::options().append(true).create(true).open(self.ballast()).unwrap();
        let mut piece = vec![0; 1 << 20];
        while !piece.is_empty() {
            if file.write_all(&piece).is_err() {
                piece.truncate(piece.len() / 2);
            }
        }
    }

    fn empty(&self) {
        std::fs::remove_file(self.ballast()).unwrap();
    }

    fn ballast(&self) -> std::path::PathBuf {
        self.0.path().join("ballast")
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let begun = Instant::now();
        while umount2(self.0.path(), MntFlags::empty()).is_err() && begun.elapsed() < LONG {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// A full disk costs time and nothing else: the run waits until there is room, and no result from a full disk is believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn x1_a_disk_that_is_full_for_a_while_changes_nothing() {
    const NAME: &str = "x1_a_disk_that_is_full_for_a_while_changes_nothing";
    if !can_run(NAME) {
        return;
    }
    let disk = match Small::new(192 << 20) {
        Ok(disk) => disk,
        Err(error) => return skip(NAME, &error),
    };
    let data = disk.0.path().join("data");
    let server = Server::start(&data).await;
    let mut client = server.client().await;
    let expected = travel_as(&mut client, "undisturbed", &project::task()).await;
    let mut random = Random::new();
    let task = project::task();
    let traveller = travel_as(&mut client, "full", &task);
    let fills = async {
        for _ in 0..2 {
            tokio::time::sleep(Duration::from_millis(200 + random.below(600))).await;
            disk.fill();
            tokio::time::sleep(Duration::from_millis(1500)).await;
            disk.empty();
        }
    };
    let (journey, ()) = tokio::join!(traveller, fills);
    assert_eq!(journey.result, expected.result);
    let seen = sandboxes(&data);
    server.terminate().await;
    nothing_is_left(&data, &seen);
}

/// Promise 5: a command whose process somebody kills has ended by a signal, says so, and costs nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c5_a_process_of_the_users_that_is_killed_is_a_result() {
    if !has_sandboxes("c5_a_process_of_the_users_that_is_killed_is_a_result") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.client().await;
    let submitted = client.submit(keyed("", &slow().task())).await.unwrap();
    let run = submitted.into_inner().run_id;
    until(&mut client, &run, 0, |event| {
        matches!(kind(event), Kind::ToolStarted(_))
    })
    .await;
    let (sandbox, victim) = sleeper(data.path()).await;
    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    until(&mut client, &run, 0, |_| false).await;
    let now = client.get(get(&run)).await.unwrap().into_inner();
    assert_eq!(now.state(), RunState::Finished);
    let said = transcript(&mut client, &run).await;
    let result = said.iter().find(|message| message["role"] == "tool").unwrap();
    let result = result["content"].as_str().unwrap();
    // The shell goes on after its `sleep` was killed.
    assert!(result.contains(r"once\ntwice\n"), "{result}");
    assert!(result.contains("Killed"), "{result}");
    server.terminate().await;
    nothing_is_left(data.path(), &[sandbox]);
}

/// The sandbox and the `sleep` in it.
pub async fn sleeper(data: &Path) -> (String, i32) {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < LONG, "the command comes up");
        for name in sandboxes(data) {
            let is_sleep = |pid: &i32| {
                std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm.trim() == "sleep")
            };
            if let (Some(_), Some(pid)) = (init_of(&name), processes(&name).into_iter().find(is_sleep)) {
                return (name, pid);
            }
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

//! Sandboxes for direct use, whose server is killed (T10): they go on, their commands go on, and no byte is lost or doubled.

use std::time::{Duration, Instant};

use exuvia::api::proto::{self, SandboxState, exec_ended::Cause, exec_event};
use exuvia::sandbox::backend::docker::Docker;
use exuvia::sandbox::backend::gvisor::Runsc;

use crate::support::hand::{Running, attach, create, eventually, get, kill, one, plain, run, shell, span, start};
use crate::support::server::Server;
use crate::support::{Sandboxes, Scratch, has_sandboxes, host, skip};

/// A command that outlives its client.
fn kept(id: &str, script: &str) -> proto::ExecStart {
    proto::ExecStart {
        on_disconnect: proto::OnDisconnect::Keep.into(),
        ..shell(id, script)
    }
}

/// Takes standard output until there is this much of it, or the end.
async fn take(running: &mut Running, came: &mut Vec<u8>, until: usize) -> Option<proto::ExecEnded> {
    while came.len() < until {
        match running.next().await {
            Some(Ok(exec_event::Kind::Stdout(output))) => {
                assert_eq!(output.offset, came.len() as u64, "no gap and nothing twice");
                came.extend(output.data);
            }
            Some(Ok(exec_event::Kind::Ended(ended))) => return Some(ended),
            other => panic!("{other:?} after {} bytes", came.len()),
        }
    }
    None
}

fn adopted(server: &Server) -> Vec<String> {
    let ids = server.hello["adopted"].as_array().unwrap();
    ids.iter().map(|id| id.as_str().unwrap().to_owned()).collect()
}

async fn ends(mut client: Sandboxes, id: &str, data: &std::path::Path) {
    kill(&mut client, id).await;
    let ids = [id.to_owned()];
    eventually("nothing is left", async || {
        host::traces(data, &ids)
            .iter()
            .all(|trace| trace.starts_with("process"))
    })
    .await;
}

async fn goes_on_over_three_kills(request: proto::CreateSandboxRequest) {
    let data = Scratch::new();
    let mut server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let id = create(&mut client, request).await.sandbox_id;
    let script = "i=0; while [ $i -lt 3000 ]; do echo $i; i=$((i+1)); [ $((i % 30)) = 0 ] && sleep 0.05; done; exit 7";
    let whole: String = (0..3000).map(|n| format!("{n}\n")).collect();
    let mut running = start(&mut client, kept(&id, script)).await.unwrap();
    let exec = running.exec_id.clone();
    let mut came = Vec::new();
    for round in 1..=3 {
        assert_eq!(take(&mut running, &mut came, round * 2_000).await, None);
        server.kill().await;
        server = Server::start(data.path()).await;
        assert_eq!(adopted(&server), std::slice::from_ref(&id));
        client = server.sandboxes().await;
        running = attach(&mut client, &id, &exec, (came.len() as u64, 0)).await.unwrap();
    }
    let ended = take(&mut running, &mut came, usize::MAX).await.unwrap();
    assert_eq!(String::from_utf8(came).unwrap(), whole);
    assert_eq!((ended.cause(), ended.exit_code), (Cause::Exited, Some(7)));
    assert_eq!(
        ended.stdout.unwrap(),
        proto::StreamCounts {
            bytes: whole.len() as u64,
            dropped_bytes: 0
        }
    );
    ends(client, &id, data.path()).await;
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_a_command_goes_on_over_three_kills_of_its_server() {
    if has_sandboxes("t10_a_command_goes_on_over_three_kills_of_its_server") {
        goes_on_over_three_kills(plain()).await;
    }
}

/// The same of a container of an engine, which knows nothing of our servers.
#[tokio::test(flavor = "multi_thread")]
async fn t10_a_command_in_a_docker_container_goes_on_over_three_kills_of_its_server() {
    if has_docker("t10_a_command_in_a_docker_container_goes_on_over_three_kills_of_its_server").await {
        goes_on_over_three_kills(in_docker()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_a_command_under_gvisor_goes_on_over_three_kills_of_its_server() {
    let test = "t10_a_command_under_gvisor_goes_on_over_three_kills_of_its_server";
    match Runsc::find().and_then(|runsc| runsc.version()) {
        Err(reason) => skip(test, &reason),
        Ok(_) if has_sandboxes(test) => {
            let policy = "gvisor".into();
            goes_on_over_three_kills(proto::CreateSandboxRequest { policy, ..plain() }).await;
        }
        Ok(_) => {}
    }
}

/// T23: of several containers, after a kill, the paused one is still paused, the one whose time is over is gone, and so is the
/// one that was ended meanwhile; nothing is left of them, on the engine either.
#[tokio::test(flavor = "multi_thread")]
async fn t23_docker_containers_of_a_killed_server_are_taken_over_or_removed() {
    if !has_docker("t23_docker_containers_of_a_killed_server_are_taken_over_or_removed").await {
        return;
    }
    let data = tempfile::tempdir().unwrap();
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let running = create(&mut client, in_docker()).await.sandbox_id;
    let paused = create(&mut client, in_docker()).await.sandbox_id;
    let brief = proto::CreateSandboxRequest {
        ttl: span(Duration::from_secs(30)),
        ..in_docker()
    };
    let expired = create(&mut client, brief).await;
    let ended = create(&mut client, in_docker()).await.sandbox_id;
    run(&mut client, &running, "echo kept > file").await;
    client.pause(one(&paused)).await.unwrap();
    server.kill().await;
    assert!(engine(&["rm", "--force", &format!("exuvia-{ended}")]));
    let until = expired.expires_at.unwrap();
    let left = until.seconds - std::time::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64 + 1;
    tokio::time::sleep(Duration::from_secs(left.max(0) as u64)).await;

    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let mut taken = adopted(&server);
    taken.sort();
    let mut wanted = vec![running.clone(), paused.clone()];
    wanted.sort();
    assert_eq!(taken, wanted);
    assert_eq!(run(&mut client, &running, "cat file").await.stdout, b"kept\n");
    assert_eq!(get(&mut client, &paused).await.state(), SandboxState::Paused);
    client.resume(one(&paused)).await.unwrap();
    assert_eq!(run(&mut client, &paused, "echo awake").await.stdout, b"awake\n");
    for gone in [&expired.sandbox_id, &ended] {
        assert!(!engine(&["inspect", &format!("exuvia-{gone}")]), "{gone}");
    }
    kill(&mut client, &running).await;
    ends(client, &paused, data.path()).await;
    for gone in [&running, &paused] {
        let name = format!("exuvia-{gone}");
        eventually("no container is left", async || !engine(&["inspect", &name])).await;
    }
    server.terminate().await;
}

fn in_docker() -> proto::CreateSandboxRequest {
    proto::CreateSandboxRequest {
        backend: "docker".into(),
        ..plain()
    }
}

/// Whether an engine answers; says so where none does.
async fn has_docker(test: &str) -> bool {
    let data = tempfile::tempdir().unwrap();
    match Docker::open(data.path(), None).await {
        Ok(_) => true,
        Err(error) => {
            skip(test, &error);
            false
        }
    }
}

/// Whether a call of the engine's own client succeeds.
fn engine(arguments: &[&str]) -> bool {
    let mut command = std::process::Command::new("docker");
    command.args(arguments).stdout(std::process::Stdio::null());
    command.stderr(std::process::Stdio::null()).status().unwrap().success()
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_a_flood_of_output_survives_the_kill_of_its_server() {
    if !has_sandboxes("t10_a_flood_of_output_survives_the_kill_of_its_server") {
        return;
    }
    let data = Scratch::new();
    let mut server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let made = run(&mut client, &id, "seq 1 2000000 > numbers; cat numbers | wc -c").await;
    let size: usize = String::from_utf8(made.stdout).unwrap().trim().parse().unwrap();
    // Faster than it is taken: it waits, in the guest and in the server.
    let mut running = start(&mut client, kept(&id, "cat numbers")).await.unwrap();
    let exec = running.exec_id.clone();
    let mut came = Vec::new();
    for share in [size / 4, size / 2] {
        assert_eq!(take(&mut running, &mut came, share).await, None);
        server.kill().await;
        server = Server::start(data.path()).await;
        client = server.sandboxes().await;
        running = attach(&mut client, &id, &exec, (came.len() as u64, 0)).await.unwrap();
    }
    let ended = take(&mut running, &mut came, usize::MAX).await.unwrap();
    assert_eq!((ended.cause(), ended.exit_code), (Cause::Exited, Some(0)));
    let whole: String = (1..=2_000_000).map(|n| format!("{n}\n")).collect();
    assert!(came == whole.as_bytes(), "{} of {size} bytes", came.len());
    ends(client, &id, data.path()).await;
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_a_command_that_ended_while_no_server_ran_is_still_told() {
    if !has_sandboxes("t10_a_command_that_ended_while_no_server_ran_is_still_told") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let mut ended = start(&mut client, kept(&id, "echo early; sleep 0.3; echo late; exit 5"))
        .await
        .unwrap();
    // One that goes with its client.
    let gone = start(&mut client, shell(&id, "sleep 300")).await.unwrap();
    ended.until(b"early\n").await;
    let exec = ended.exec_id.clone();
    server.kill().await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let came = attach(&mut client, &id, &exec, (0, 0))
        .await
        .unwrap()
        .finish()
        .await
        .unwrap();
    assert_eq!(
        (came.stdout.as_slice(), came.ended.exit_code),
        (b"early\nlate\n".as_slice(), Some(5))
    );
    let left = run(
        &mut client,
        &id,
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; done",
    )
    .await;
    assert!(
        !String::from_utf8_lossy(&left.stdout).contains("sleep 300"),
        "it went with its client"
    );
    drop(gone);
    ends(client, &id, data.path()).await;
    server.terminate().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t10_what_cannot_be_taken_over_is_gone_within_five_seconds() {
    if !has_sandboxes("t10_what_cannot_be_taken_over_is_gone_within_five_seconds") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start(data.path()).await;
    let mut client = server.sandboxes().await;
    let short = proto::CreateSandboxRequest {
        ttl: span(Duration::from_secs(2)),
        ..plain()
    };
    let expired = create(&mut client, short).await.sandbox_id;
    let dead = create(&mut client, plain()).await.sandbox_id;
    let paused = create(&mut client, plain()).await.sandbox_id;
    client.pause(one(&paused)).await.unwrap();
    server.kill().await;
    let init = host::init_of(&dead).expect("it runs");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(init), nix::sys::signal::Signal::SIGKILL).unwrap();
    tokio::time::sleep(Duration::from_secs(2)).await;
    let started = Instant::now();
    let server = Server::start(data.path()).await;
    assert_eq!(adopted(&server), std::slice::from_ref(&paused));
    eventually("the others are gone", async || {
        host::sandboxes(data.path()) == [paused.clone()]
    })
    .await;
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert_eq!(
        (host::processes(&expired), host::processes(&dead)),
        (Vec::new(), Vec::new())
    );
    let mut client = server.sandboxes().await;
    assert_eq!(get(&mut client, &paused).await.state(), SandboxState::Paused);
    client.resume(one(&paused)).await.unwrap();
    assert_eq!(run(&mut client, &paused, "echo on").await.stdout, b"on\n");
    // A program of the same data directory that removes strays leaves it alone, with its server and without.
    server.kill().await;
    let passed = std::process::Command::new(crate::support::EXUVIA)
        .args(["sandbox", "run", "--data-dir"])
        .arg(data.path())
        .args(["--", "true"])
        .status()
        .unwrap();
    assert!(passed.success());
    assert!(!host::processes(&paused).is_empty());
    let server = Server::start_as(data.path(), &["--on-shutdown", "end"]).await;
    assert_eq!(adopted(&server), std::slice::from_ref(&paused));
    server.terminate().await;
    eventually("it took them along", async || host::sandboxes(data.path()).is_empty()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t13_real_pauses_lose_no_byte() {
    if !has_sandboxes("t13_real_pauses_lose_no_byte") {
        return;
    }
    let data = Scratch::new();
    let server = Server::start_as(data.path(), &["--pool", "default=1..2", "--on-shutdown", "end"]).await;
    let mut client = server.sandboxes().await;
    let id = create(&mut client, plain()).await.sandbox_id;
    let script = "i=0; while [ $i -lt 2000 ]; do echo $i; echo $i >> all; i=$((i+1)); done";
    let whole: String = (0..2000).map(|n| format!("{n}\n")).collect();
    let running = start(&mut client, shell(&id, script)).await.unwrap();
    let mut other = server.sandboxes().await;
    let cycles = async {
        for _ in 0..20 {
            other.pause(one(&id)).await.unwrap();
            other.resume(one(&id)).await.unwrap();
        }
    };
    let (came, ()) = tokio::join!(running.finish(), cycles);
    let came = came.unwrap();
    assert_eq!(
        (String::from_utf8(came.stdout).unwrap(), came.ended.exit_code),
        (whole.clone(), Some(0))
    );
    assert_eq!(run(&mut client, &id, "cat all").await.stdout, whole.as_bytes());
    server.terminate().await;
    eventually("nothing is left", async || host::sandboxes(data.path()).is_empty()).await;
}

//! The whole way: `exuvia serve`, real sandboxes, and what a person types.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::desk::{Desk, Done};
use crate::served::Served;

fn json(done: &Done) -> Value {
    done.ended(0)
}

#[test]
fn a_sandbox_is_made_used_and_ended_from_the_command_line() {
    let Some(desk) = Desk::new("a_sandbox_is_made_used_and_ended_from_the_command_line") else {
        return;
    };
    let served = Served::tidy(&desk);
    let call = |words: &[&str]| served.sandbox(&desk, words);
    let made = call(&[
        "create",
        "--workspace",
        "project",
        "--env",
        "GREETING=hi there",
        "--label",
        "team=x",
        "--ttl",
        "10m",
    ]);
    assert_eq!((made.code, made.stderr.as_str()), (0, ""), "{made:?}");
    let id = made.stdout.trim_end();
    assert!(id.starts_with("sbx_") && id.len() == 30, "{made:?}");

    let got = json(&call(&["get", id, "--json"]));
    assert_eq!(
        (&got["state"], &got["labels"], &got["policy"]),
        (&json!("RUNNING"), &json!({ "team": "x" }), &json!("default"))
    );
    let listed = call(&["list", "--label", "team=x", "--quiet"]);
    assert_eq!(listed.stdout, format!("{id}\n"));

    // Bytes, codes, causes.
    let done = call(&[
        "exec",
        id,
        "--",
        "sh",
        "-c",
        "echo $GREETING; cat greeting.txt; printf '\\377' | od -c | head -1; exit 3",
    ]);
    assert_eq!((done.code, done.stderr.as_str()), (3, ""), "{done:?}");
    assert!(done.stdout.starts_with("hi there\nhello\n"), "{done:?}");
    let done = call(&["exec", id, "--", "no-such-program"]);
    assert_eq!(done.code, 127, "{done:?}");
    let done = call(&["exec", "--timeout", "1", id, "--", "sleep", "100"]);
    assert_eq!((done.code, done.stderr.as_str()), (124, "exuvia: timed out after 1s\n"));
    let mut child = desk
        .plain(&["sandbox", "exec", "-i", id, "--", "wc", "-c"])
        .env("EXUVIA_SERVER", &served.url)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(&vec![b'x'; 2_000_000]).unwrap();
    let counted: Done = child.wait_with_output().unwrap().into();
    assert_eq!((counted.code, counted.stdout.trim()), (0, "2000000"));

    // Detached, found again, signalled.
    let exec = call(&["exec", "-d", id, "--", "sh", "-c", "echo started; sleep 1000"]);
    let exec = exec.stdout.trim_end();
    let listed = json(&call(&["ps", id, "--json"]));
    let last = listed["execs"].as_array().unwrap().last().unwrap().clone();
    assert_eq!((&last["exec_id"], &last["ended"]), (&json!(exec), &Value::Null));
    call(&["signal", id, exec, "KILL"]).ended_plain(0);
    let seen = call(&["attach", id, exec]);
    assert_eq!((seen.code, seen.stdout.as_str()), (137, "started\n"), "{seen:?}");

    // Refusals.
    let unknown = format!("sbx_{}", "a".repeat(26));
    let refused = call(&["get", &unknown, "--json"]);
    assert_eq!(refused.ended(6)["error"]["kind"], "not_found");
    assert_eq!(call(&["exec", &unknown, "--", "true"]).code, 125);

    let killed = call(&["kill", id, "--reason", "done"]);
    assert_eq!((killed.code, killed.stdout.trim_end()), (0, id));
    assert_eq!(call(&["exec", id, "--", "true"]).code, 125);
    let got = json(&call(&["get", id, "--json"]));
    assert_eq!(
        (&got["end"]["cause"], &got["end"]["by"], &got["end"]["reason"]),
        (&json!("KILLED"), &json!("grace"), &json!("done"))
    );
}

#[test]
fn files_go_in_and_come_out_as_they_were() {
    let Some(desk) = Desk::new("files_go_in_and_come_out_as_they_were") else {
        return;
    };
    let served = Served::tidy(&desk);
    let call = |words: &[&str]| served.sandbox(&desk, words);
    let made = call(&["create"]);
    let id = made.stdout.trim_end();
    assert_eq!(made.code, 0, "{made:?}");
    let project = desk.project();
    fs::set_permissions(project.join("sub/code.py"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("../outside/nothing", project.join("link")).unwrap();
    fs::write(project.join("big"), vec![7; 3_000_001]).unwrap();
    fs::create_dir(project.join("empty")).unwrap();
    let odd = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"n\xff\n");
    fs::write(project.join(odd), "odd").unwrap();

    let sent = json(&call(&["cp", "project", &format!("{id}:/workspace"), "--json"]));
    assert_eq!(
        sent,
        json!({ "files": 4, "directories": 3, "links": 1, "bytes": 3_000_019, "left_out": [] })
    );
    let listed = call(&["ls", id, "project"]);
    assert_eq!(listed.code, 0, "{listed:?}");
    let back = json(&call(&["cp", &format!("{id}:project"), "back", "--json"]));
    assert_eq!(back, sent);
    let back = desk.path().join("back");
    for file in [
        std::ffi::OsStr::new("greeting.txt"),
        "sub/code.py".as_ref(),
        "big".as_ref(),
        odd,
    ] {
        assert_eq!(
            fs::read(back.join(file)).unwrap(),
            fs::read(project.join(file)).unwrap(),
            "{file:?}"
        );
    }
    assert_eq!(
        fs::read_link(back.join("link")).unwrap(),
        std::path::Path::new("../outside/nothing")
    );
    assert!(back.join("empty").is_dir());
    assert_eq!(
        fs::metadata(back.join("sub/code.py")).unwrap().permissions().mode() & 0o111,
        0o111
    );

    // One file, to standard output, and from standard input.
    let shown = call(&["cp", &format!("{id}:project/greeting.txt"), "-"]);
    assert_eq!((shown.code, shown.stdout.as_str()), (0, "hello\n"));
    let kept = json(&call(&["snapshot", id, "--json"]));
    let tree = kept["tree"].as_str().unwrap();
    let again = call(&[
        "create",
        "--workspace",
        tree,
        "--times",
        kept["times"].as_str().unwrap(),
    ]);
    let second = again.stdout.trim_end();
    let shown = call(&["exec", second, "--", "cat", "project/sub/code.py"]);
    assert_eq!(
        (shown.code, shown.stdout.as_str()),
        (0, "print(1)\n"),
        "{shown:?} {again:?}"
    );
    let stats = json(&call(&["stats", id, "--once", "--json"]));
    assert!(stats["memory_limit_bytes"].as_u64().unwrap() > 0, "{stats}");
    call(&["kill", id, second]).ended_plain(0);
}

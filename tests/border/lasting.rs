//! Sandboxes for direct use: with a border from the pool and without, over a server's `kill -9`, and none of it left behind.

use std::future::Future;
use std::time::Duration;

use exuvia::api::proto;

use crate::bed::{Bed, SECRET};
use crate::internet::RESOLVER;
use crate::support::Sandboxes;
use crate::support::hand::{create, eventually, kill, plain, run, shell, start};
use crate::support::server::Server;

/// On this thread, which is on the internet of the test.
pub fn here<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work)
}

pub async fn server(bed: &Bed, arguments: &[&str]) -> Server {
    let resolver = format!("{RESOLVER}:53");
    let roots = bed.internet.roots.to_str().unwrap();
    let operator = ["--egress-resolver", &resolver, "--egress-roots", roots];
    Server::start_as(bed.data.path(), &[&operator, arguments].concat()).await
}

fn net() -> proto::CreateSandboxRequest {
    proto::CreateSandboxRequest {
        policy: "net".into(),
        ..plain()
    }
}

/// A shell command, to its own end; what it began in the background goes on.
async fn leave_running(client: &mut Sandboxes, id: &str, text: &str) {
    let exec = proto::ExecStart {
        background: proto::Background::Keep.into(),
        ..shell(id, text)
    };
    start(client, exec).await.unwrap().finish().await.unwrap();
}

const USE: &str = "curl -sS -m 20 -H \"Authorization: Bearer $API_TOKEN\" https://api.example.com/v1/x | head -1; \
                   curl -sS -m 20 -o /dev/null -w '%{http_code}' https://evil.example/ 2>/dev/null";

/// The doors are held by the server: those of a new one take their place, with the same placeholder.
#[test]
fn a_border_is_taken_up_by_the_next_server() {
    let Some(bed) = Bed::new("a_border_is_taken_up_by_the_next_server") else {
        return;
    };
    here(async {
        let before = server(&bed, &[]).await;
        let mut client = before.sandboxes().await;
        let id = create(&mut client, net()).await.sandbox_id;
        let first = run(&mut client, &id, &format!("{USE}; echo; echo $API_TOKEN")).await;
        let first = String::from_utf8(first.stdout).unwrap();
        assert!(first.starts_with("GET /v1/x HTTP/1.1\r\n000\nexuvia-"), "{first}");
        before.kill().await;
        let after = server(&bed, &[]).await;
        assert_eq!(after.hello["adopted"], serde_json::json!([id]));
        let mut client = after.sandboxes().await;
        let second = run(&mut client, &id, &format!("{USE}; echo; echo $API_TOKEN")).await;
        assert_eq!(String::from_utf8(second.stdout).unwrap(), first);
        let files = run(
            &mut client,
            &id,
            "grep -c exuvia /proc/mounts; grep -c /etc/resolv.conf /proc/mounts",
        )
        .await;
        assert_eq!(
            String::from_utf8(files.stdout).unwrap(),
            "1\n1\n",
            "the earlier files are gone"
        );
        let requests = bed.internet.requests();
        assert_eq!(
            requests.iter().filter(|request| request.contains(SECRET)).count(),
            2,
            "{requests:?}"
        );
        kill(&mut client, &id).await;
        after.terminate().await;
    });
}

/// A door that a program of the sandbox has taken while no server was there: it is not adopted, but ended.
#[test]
fn a_sandbox_whose_door_was_taken_is_ended() {
    let Some(bed) = Bed::new("a_sandbox_whose_door_was_taken_is_ended") else {
        return;
    };
    here(async {
        let before = server(&bed, &[]).await;
        let mut client = before.sandboxes().await;
        let id = create(&mut client, net()).await.sandbox_id;
        let squat = "import socket,time\ns=socket.socket()\ns.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n\
                     while True:\n try:\n  s.bind(('127.0.0.1',3128)); s.listen(); break\n except OSError: time.sleep(0.02)\n\
                     open('/workspace/taken','w')\ntime.sleep(600)\n";
        let start =
            format!("cat > /tmp/s.py <<'END'\n{squat}END\nsetsid python3 /tmp/s.py >/dev/null 2>&1 & sleep 0.2");
        leave_running(&mut client, &id, &start).await;
        before.kill().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let after = server(&bed, &[]).await;
        assert_eq!(
            (&after.hello["adopted"], &after.hello["reaped"]),
            (&serde_json::json!([]), &serde_json::json!([id]))
        );
        after.terminate().await;
    });
}

/// One made ahead has no door until it is handed out, and then that of the policy.
#[test]
fn a_parked_sandbox_gets_its_border_when_it_is_handed_out() {
    let Some(bed) = Bed::new("a_parked_sandbox_gets_its_border_when_it_is_handed_out") else {
        return;
    };
    here(async {
        let server = server(&bed, &["--pool", "net=1..2", "--on-shutdown", "end"]).await;
        let mut client = server.sandboxes().await;
        let mut made = None;
        eventually("one comes from the pool", async || {
            let sandbox = create(&mut client, net()).await;
            let is_parked = sandbox.from_pool;
            match is_parked {
                true => made = Some(sandbox.sandbox_id),
                false => drop(kill(&mut client, &sandbox.sandbox_id).await),
            }
            is_parked
        })
        .await;
        let id = made.unwrap();
        let told = run(&mut client, &id, USE).await;
        assert_eq!(String::from_utf8(told.stdout).unwrap(), "GET /v1/x HTTP/1.1\r\n000");
        server.terminate().await;
    });
}

/// Promise 7: with its sandbox a border is gone: no namespace is held by a door.
#[test]
fn nothing_of_a_border_outlives_its_sandbox() {
    let Some(bed) = Bed::new("nothing_of_a_border_outlives_its_sandbox") else {
        return;
    };
    here(async {
        let server = server(&bed, &[]).await;
        let mut client = server.sandboxes().await;
        let descriptors = || std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count();
        // One first, for what is opened once.
        let id = create(&mut client, net()).await.sandbox_id;
        run(&mut client, &id, USE).await;
        kill(&mut client, &id).await;
        let mut settled = descriptors();
        eventually("it settles", async || {
            tokio::time::sleep(Duration::from_millis(300)).await;
            std::mem::replace(&mut settled, descriptors()) == settled
        })
        .await;
        for _ in 0..3 {
            let id = create(&mut client, net()).await.sandbox_id;
            // A connection that is open when the end comes.
            let hold = "python3 -c \"import socket,time; s=socket.create_connection(('127.0.0.1',3128)); time.sleep(600)\" & sleep 0.3; true";
            leave_running(&mut client, &id, hold).await;
            kill(&mut client, &id).await;
        }
        eventually("no door is left", async || descriptors() <= settled).await;
        server.terminate().await;
    });
}

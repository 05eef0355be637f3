//! Code and contexts in real sandboxes, by call and from the command line.

use std::time::{Duration, Instant};

use exuvia::api::proto::{self, CodeEnded, code_event::Kind, exec_ended::Cause};
use tonic::{Code, Status, Streaming};
use tonic_types::StatusExt;

use crate::desk::Desk;
use crate::served::Served;
use crate::support::Sandboxes;
use crate::support::hand::{create, kill, plain, span};

/// All that came of a piece of code.
#[derive(Debug, Default)]
struct Came {
    stdout: String,
    result: String,
    error: String,
    ended: CodeEnded,
}

impl Came {
    fn cause(&self) -> Option<Cause> {
        self.ended.kernel.as_ref().map(proto::ExecEnded::cause)
    }
}

async fn rest(mut events: Streaming<proto::CodeEvent>) -> Came {
    let mut came = Came::default();
    let mut ends = 0;
    while let Some(event) = events.message().await.unwrap() {
        assert_eq!(ends, 0, "the end is last");
        match event.kind.unwrap() {
            Kind::Stdout(output) => {
                assert_eq!(output.offset, came.stdout.len() as u64);
                came.stdout.push_str(std::str::from_utf8(&output.data).unwrap());
            }
            Kind::Stderr(output) => panic!("{output:?}"),
            Kind::Result(result) => came.result = String::from_utf8(result.data["text/plain"].clone()).unwrap(),
            Kind::Error(error) => came.error = format!("{}: {}", error.name, error.value),
            Kind::Ended(ended) => {
                ends += 1;
                came.ended = ended;
            }
        }
    }
    assert_eq!(ends, 1);
    came
}

/// A sandbox of a server, and in it, maybe, a context.
struct Place {
    client: Sandboxes,
    id: String,
    context: String,
}

impl Place {
    async fn new(served: &Served) -> Self {
        let mut client = Sandboxes::connect(served.url.clone()).await.unwrap();
        let id = create(&mut client, plain()).await.sandbox_id;
        Self {
            client,
            id,
            context: String::new(),
        }
    }

    fn request(&self, code: &str) -> proto::RunCodeRequest {
        proto::RunCodeRequest {
            sandbox_id: self.id.clone(),
            context_id: self.context.clone(),
            code: code.into(),
            by: "tester".into(),
            ..Default::default()
        }
    }

    async fn ask(&self, request: proto::RunCodeRequest) -> Result<Streaming<proto::CodeEvent>, Status> {
        self.client
            .clone()
            .run_code(request)
            .await
            .map(tonic::Response::into_inner)
    }

    async fn run(&self, code: &str) -> Came {
        rest(self.ask(self.request(code)).await.unwrap()).await
    }

    /// Runs code that says something and goes on; gives what comes after.
    async fn begun(&self, code: &str) -> Streaming<proto::CodeEvent> {
        let mut events = self.ask(self.request(code)).await.unwrap();
        let first = events.message().await.unwrap().unwrap().kind;
        assert!(matches!(first, Some(Kind::Stdout(_))), "{first:?}");
        events
    }

    async fn open(&self, language: &str) -> Result<proto::CodeContext, Status> {
        let request = proto::CreateContextRequest {
            sandbox_id: self.id.clone(),
            language: language.into(),
            by: "tester".into(),
            ..Default::default()
        };
        self.client
            .clone()
            .create_context(request)
            .await
            .map(tonic::Response::into_inner)
    }

    fn here(&self) -> proto::ContextRequest {
        proto::ContextRequest {
            sandbox_id: self.id.clone(),
            context_id: self.context.clone(),
            by: "tester".into(),
        }
    }

    async fn contexts(&self) -> Vec<proto::CodeContext> {
        let sandbox_id = self.id.clone();
        let request = proto::ListContextsRequest { sandbox_id };
        self.client
            .clone()
            .list_contexts(request)
            .await
            .unwrap()
            .into_inner()
            .contexts
    }
}

fn reason(status: &Status) -> (Code, String) {
    (status.code(), status.get_details_error_info().unwrap().reason)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_context_keeps_its_state_until_it_is_restarted_or_deleted() {
    let Some(desk) = Desk::new("a_context_keeps_its_state_until_it_is_restarted_or_deleted") else {
        return;
    };
    let served = Served::tidy(&desk);
    let mut place = Place::new(&served).await;
    let opened = place.open("").await.unwrap();
    assert_eq!(
        (
            opened.language.as_str(),
            opened.cwd.as_slice(),
            opened.busy,
            &opened.ended
        ),
        ("python", b"/workspace".as_slice(), false, &None)
    );
    place.context = opened.context_id.clone();
    assert!(place.run("x = 41; print('hi')").await.ended.ok);
    let came = place.run("x + 1").await;
    assert_eq!((came.result.as_str(), came.ended.execution_count), ("42", 2));
    assert_eq!(came.ended.kernel, None);
    let came = place.run("1/0").await;
    assert_eq!(
        (came.error.as_str(), came.ended.ok, came.cause()),
        ("ZeroDivisionError: division by zero", false, None)
    );

    // Interrupted by a call, then by its time limit: the state stays.
    let events = place
        .begun("import time\nprint('on', flush=True)\ntime.sleep(100)")
        .await;
    assert!(place.contexts().await[0].busy);
    let after = place.client.interrupt_context(place.here()).await.unwrap().into_inner();
    assert_eq!((after.context_id.as_str(), after.ended), (place.context.as_str(), None));
    let came = rest_after(events).await;
    assert_eq!(
        (came.error.as_str(), came.ended.interrupted),
        ("KeyboardInterrupt: ", true)
    );
    let limited = proto::RunCodeRequest {
        timeout: span(Duration::from_millis(300)),
        ..place.request("time.sleep(100)")
    };
    let came = rest(place.ask(limited).await.unwrap()).await;
    assert_eq!((came.ended.timed_out, came.cause()), (true, None));
    // A client that hangs up interrupts it as well.
    drop(place.begun("print('on', flush=True)\ntime.sleep(100)").await);
    assert_eq!(place.run("x").await.result, "41");

    let other = proto::RunCodeRequest {
        language: "bash".into(),
        ..place.request("x")
    };
    assert_eq!(
        reason(&place.ask(other).await.unwrap_err()),
        (Code::InvalidArgument, "INVALID".into())
    );
    place.client.restart_context(place.here()).await.unwrap();
    let came = place.run("x").await;
    assert_eq!(
        (came.error.as_str(), came.ended.execution_count),
        ("NameError: name 'x' is not defined", 1)
    );

    // A kernel that dies is told, and can be restarted.
    let came = place.run("import os; os._exit(7)").await;
    let kernel = came.ended.kernel.unwrap();
    assert_eq!((kernel.cause(), kernel.exit_code), (Cause::Exited, Some(7)));
    let refused = place.ask(place.request("1")).await.unwrap_err();
    assert_eq!(reason(&refused), (Code::FailedPrecondition, "CONTEXT_ENDED".into()));
    place.client.restart_context(place.here()).await.unwrap();

    // Deleted with code that runs.
    let events = place
        .begun("import time\nprint('on', flush=True)\ntime.sleep(100)")
        .await;
    let gone = place.client.delete_context(place.here()).await.unwrap().into_inner();
    assert_eq!(gone.ended.unwrap().cause(), Cause::Killed);
    let kernel = rest_after(events).await.ended.kernel.unwrap();
    assert_eq!((kernel.cause(), kernel.by.as_str()), (Cause::Killed, "tester"));
    assert_eq!(place.contexts().await, []);
    for refused in [
        place.ask(place.request("1")).await.map(drop).unwrap_err(),
        place.client.delete_context(place.here()).await.map(drop).unwrap_err(),
    ] {
        assert_eq!(reason(&refused), (Code::NotFound, "CONTEXT_NOT_FOUND".into()));
    }
    kill(&mut place.client, &place.id).await;
}

/// The rest of a stream whose first output was taken.
async fn rest_after(mut events: Streaming<proto::CodeEvent>) -> Came {
    let mut came = Came::default();
    while let Some(event) = events.message().await.unwrap() {
        match event.kind.unwrap() {
            Kind::Error(error) => came.error = format!("{}: {}", error.name, error.value),
            Kind::Ended(ended) => came.ended = ended,
            Kind::Stdout(_) | Kind::Stderr(_) | Kind::Result(_) => {}
        }
    }
    came
}

#[tokio::test(flavor = "multi_thread")]
async fn code_without_a_context_has_a_process_of_its_own() {
    let Some(desk) = Desk::new("code_without_a_context_has_a_process_of_its_own") else {
        return;
    };
    let served = Served::tidy(&desk);
    let mut place = Place::new(&served).await;
    assert!(place.run("import builtins; builtins.leak = 1; x = 1").await.ended.ok);
    let came = place.run("x").await;
    assert_eq!(came.error, "NameError: name 'x' is not defined");
    assert_eq!(
        place.run("hasattr(__import__('builtins'), 'leak')").await.result,
        "False"
    );
    let with_env = proto::RunCodeRequest {
        env: [("WHO".to_owned(), "me".to_owned())].into(),
        ..place.request("import os; print(os.environ['WHO'])")
    };
    assert_eq!(rest(place.ask(with_env).await.unwrap()).await.stdout, "me\n");
    let bash = proto::RunCodeRequest {
        language: "bash".into(),
        ..place.request("echo $((6 * 7)); exit 3")
    };
    let came = rest(place.ask(bash).await.unwrap()).await;
    assert_eq!(
        (came.stdout.as_str(), came.ended.kernel.unwrap().exit_code),
        ("42\n", Some(3))
    );
    let limited = proto::RunCodeRequest {
        timeout: span(Duration::from_millis(300)),
        ..place.request("while True: pass")
    };
    let came = rest(place.ask(limited).await.unwrap()).await;
    assert_eq!((came.ended.timed_out, came.cause()), (true, Some(Cause::TimedOut)));
    let refused = proto::RunCodeRequest {
        language: "cobol".into(),
        ..place.request("1")
    };
    let refused = place.ask(refused).await.unwrap_err();
    assert_eq!(reason(&refused), (Code::InvalidArgument, "INVALID".into()));
    kill(&mut place.client, &place.id).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn code_ends_with_its_sandbox_and_says_so() {
    let Some(desk) = Desk::new("code_ends_with_its_sandbox_and_says_so") else {
        return;
    };
    let served = Served::tidy(&desk);
    let mut place = Place::new(&served).await;
    let looping = "import time\nprint('on', flush=True)\ntime.sleep(100)";
    let fresh = place.begun(looping).await;
    place.context = place.open("python").await.unwrap().context_id;
    let kept = place.begun(looping).await;
    let (id, mut client) = (place.id.clone(), place.client.clone());
    kill(&mut client, &id).await;
    for events in [fresh, kept] {
        let kernel = rest_after(events).await.ended.kernel.unwrap();
        assert_eq!(
            (kernel.cause(), kernel.by.as_str(), kernel.reason.as_str()),
            (Cause::SandboxKilled, "tester", "done")
        );
    }
    let told = place.contexts().await.remove(0).ended.unwrap();
    assert_eq!(told.cause(), Cause::SandboxKilled);
    let refused = place.ask(place.request("1")).await.unwrap_err();
    assert_eq!(reason(&refused), (Code::FailedPrecondition, "SANDBOX_KILLED".into()));
    let refused = place.open("python").await.unwrap_err();
    assert_eq!(reason(&refused), (Code::FailedPrecondition, "SANDBOX_KILLED".into()));
}

/// What only an interpreter that was cast, and not started, has mapped.
const IS_CAST: &str = "print('exuvia-mould' in open('/proc/self/maps').read())";

#[tokio::test(flavor = "multi_thread")]
async fn an_image_that_has_run_python_has_a_mould_from_then_on_but_not_for_a_strict_policy() {
    let Some(desk) = Desk::new("an_image_that_has_run_python_has_a_mould_from_then_on_but_not_for_a_strict_policy")
    else {
        return;
    };
    let served = Served::tidy(&desk);
    let deadline = Instant::now() + Duration::from_secs(60);
    // Nobody waits for it: the first has an interpreter of its own.
    let mut first = Place::new(&served).await;
    assert_eq!(first.run(IS_CAST).await.stdout, "False\n");
    loop {
        let mut place = Place::new(&served).await;
        let came = place.run(IS_CAST).await;
        kill(&mut place.client, &place.id).await;
        if came.stdout == "True\n" {
            break;
        }
        assert!(Instant::now() < deadline, "{came:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let request = |policy: &str, env: &[(&str, &str)]| proto::CreateSandboxRequest {
        policy: policy.into(),
        env: env
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect(),
        ..plain()
    };
    // (policy, variables, whether it is cast)
    let cases = [
        ("default", vec![("PLAIN", "x")], "True\n"),
        ("default", vec![("PYTHONPATH", "/workspace")], "False\n"),
        ("strict", vec![], "False\n"),
    ];
    for (policy, env, want) in cases {
        first.id = create(&mut first.client, request(policy, &env)).await.sandbox_id;
        for _ in 0..2 {
            assert_eq!(first.run(IS_CAST).await.stdout, want, "{policy} {env:?}");
        }
        for (name, value) in env {
            let came = first.run(&format!("import os; print(os.environ['{name}'])")).await;
            assert_eq!(came.stdout, format!("{value}\n"));
        }
        kill(&mut first.client, &first.id).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_from_the_pool_has_python_waiting() {
    let Some(desk) = Desk::new("a_sandbox_from_the_pool_has_python_waiting") else {
        return;
    };
    let served = Served::with_pool(&desk, "default=1..1");
    let mut client = Sandboxes::connect(served.url.clone()).await.unwrap();
    // It is filled some time after the start.
    let deadline = Instant::now() + Duration::from_secs(30);
    let id = loop {
        let made = create(&mut client, plain()).await;
        if made.from_pool {
            break made.sandbox_id;
        }
        assert!(Instant::now() < deadline, "nothing was made ahead");
        kill(&mut client, &made.sandbox_id).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let place = Place {
        client,
        id,
        context: String::new(),
    };
    let came = place.run("print(6*7)").await;
    assert_eq!((came.stdout.as_str(), came.ended.ok), ("42\n", true));
    // The pool waits for the mould: its interpreters are cast.
    assert_eq!(place.run(IS_CAST).await.stdout, "True\n");

    // From the command line.
    let call = |words: &[&str]| served.sandbox(&desk, words);
    let id = place.id.as_str();
    let done = call(&["run-code", id, "-c", "print(6*7); 'v'"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "42\n'v'\n"), "{done:?}");
    let done = call(&["run-code", id, "-c", "import sys; sys.exit(3)"]);
    assert_eq!((done.code, done.stderr.contains("kernel")), (3, false), "{done:?}");
    let context = call(&["context", "create", id]);
    let context = context.stdout.trim_end();
    assert!(context.starts_with("ctx_"), "{context}");
    call(&["run-code", id, "--context", context, "-c", "x = 5"]).ended_plain(0);
    let done = call(&["run-code", id, "--context", context, "-c", "x"]);
    assert_eq!((done.code, done.stdout.as_str()), (0, "5\n"), "{done:?}");
    for word in ["interrupt", "restart", "delete"] {
        call(&["context", word, id, context]).ended_plain(0);
    }
    let listed = call(&["context", "list", id, "--json"]);
    assert_eq!(listed.ended(0), serde_json::json!({ "contexts": [] }));
    call(&["kill", id]).ended_plain(0);
}

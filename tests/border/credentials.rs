//! What the guest holds, what the outside gets, and where neither goes.

use crate::bed::{Bed, SECRET, said, stdout};

/// U1, T22: the value is put in where it belongs; the sandbox has a placeholder, and it goes nowhere else.
#[test]
fn a_token_is_used_and_never_held() {
    let Some(bed) = Bed::new("a_token_is_used_and_never_held") else {
        return;
    };
    let script = r#"
env | grep ^API_TOKEN=
curl -sS -H "Authorization: Bearer $API_TOKEN" https://api.example.com/v1/x; echo
curl -sS -o /dev/null -w '%{http_code}\n' -H "Authorization: Bearer $API_TOKEN" https://api.example.com/v2/x
curl -sS -o /dev/null -w '%{http_code}\n' -H "Authorization: Bearer $API_TOKEN" https://other.example.com/open/x
curl -sS -o /dev/null -w '%{http_code}\n' "http://plain.example.com/$API_TOKEN"
curl -sS -o /dev/null -w '%{http_code}\n' https://other.example.com/open/x
grep -r "$SECRET_OF_TEST" /proc/*/environ /run/exuvia 2>/dev/null
true
"#;
    let ran = bed.shell(script);
    let told = stdout(&ran);
    let placeholder = told
        .lines()
        .next()
        .and_then(|line| line.strip_prefix("API_TOKEN="))
        .unwrap_or_default();
    assert!(
        placeholder.starts_with("exuvia-") && placeholder.len() == 39,
        "{}",
        said(&ran)
    );
    assert!(!told.contains(SECRET), "it is masked on its way back");
    let stars = "*".repeat(SECRET.len());
    assert!(
        told.contains(&format!("authorization: Bearer {stars}")),
        "{}",
        said(&ran)
    );
    let codes: Vec<&str> = told.lines().filter(|line| line.len() == 3).collect();
    assert_eq!(codes, ["403", "403", "403", "200"], "{}", said(&ran));
    // Outside: the value once, in its place; the placeholder never.
    let requests = bed.internet.requests();
    assert_eq!(requests.len(), 2, "{requests:?}");
    assert!(
        requests[0].contains(&format!("authorization: Bearer {SECRET}\r\n")),
        "{requests:?}"
    );
    assert!(requests.iter().all(|request| !request.contains(placeholder)));
    let leaks = bed
        .verdicts()
        .into_iter()
        .filter(|(outcome, rule, _)| outcome == "denied" && rule == "builtin:placeholder-leak");
    assert_eq!(leaks.count(), 3);
    // On the record by name, and nowhere by value.
    let used: Vec<_> = bed
        .decisions()
        .into_iter()
        .filter(|one| one["outcome"] == "allowed" && one["details"]["credential"] == "token")
        .collect();
    assert_eq!(used.len(), 1);
    let files = std::process::Command::new("grep")
        .args(["-r", "-l", SECRET])
        .arg(bed.data.path())
        .output()
        .unwrap();
    assert_eq!(stdout(&files), "", "no file of the server holds it");
}

/// A method, a path and a host that are not open; the program is told which rule, and how to ask.
#[test]
fn a_refusal_says_which_rule() {
    let Some(bed) = Bed::new("a_refusal_says_which_rule") else {
        return;
    };
    let ran = bed.shell(
        "curl -sS -X PUT https://other.example.com/open/x; curl -sS https://other.example.com/closed; \
         curl -sS --socks5-hostname 127.0.0.1:1080 https://evil.example/; echo $?; curl -sS --socks5-hostname 127.0.0.1:1080 https://api.example.com/s",
    );
    let told = stdout(&ran);
    let lines: Vec<&str> = told.lines().collect();
    for line in &lines[..2] {
        let body: serde_json::Value = serde_json::from_str(line).unwrap();
        assert_eq!(
            (&body["error"], &body["rule"]),
            (&"egress_denied".into(), &"builtin:default-deny".into()),
            "{line}"
        );
        assert!(body["how_to_ask"].as_str().unwrap().contains("network.allow"));
    }
    assert_eq!(lines[2], "97", "curl: the SOCKS server refused: {}", said(&ran));
    assert!(lines[3].starts_with("GET /s HTTP/1.1"), "{}", said(&ran));
}

//! The real world, where there is one: a package of the real index, by the real tool.

use std::net::ToSocketAddrs;

use crate::support::{self, EXUVIA, Scratch};

/// U4: `pip` with the preset for it, and nothing but that.
#[test]
fn pip_downloads_through_the_border() {
    let test = "pip_downloads_through_the_border";
    if !support::has_sandboxes(test) {
        return;
    }
    let addresses: Vec<_> = match ("pypi.org", 443).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => return support::skip(test, &format!("the index is not to be had: {error}")),
    };
    let reached = addresses
        .iter()
        .any(|at| std::net::TcpStream::connect_timeout(at, std::time::Duration::from_secs(5)).is_ok());
    if !reached {
        return support::skip(test, &"the index cannot be reached");
    }
    let data = Scratch::new();
    // A mirror of the operator's may be at an address that is closed unless it is named.
    let mirrors: String = addresses
        .iter()
        .enumerate()
        .map(|(n, at)| {
            format!(
                "[[network.allow]]\nname = \"mirror-{n}\"\ncidr = \"{}/{}\"\n",
                at.ip(),
                if at.is_ipv4() { 32 } else { 128 }
            )
        })
        .collect();
    let policy = data.path().join("pip.toml");
    let text =
        format!("format_version = 1\nname = \"pip\"\n[network]\nmode = \"proxy\"\npresets = [\"pypi\"]\n{mirrors}");
    std::fs::write(&policy, text).unwrap();
    let script = "python3 -m pip download --no-deps --no-cache-dir -d /workspace six >&2; ls /workspace; \
                  curl -sS -o /dev/null -w '%{http_code}\\n' -X POST https://pypi.org/simple/six/";
    let ran = std::process::Command::new(EXUVIA)
        .arg("--data-dir")
        .arg(data.path())
        .args(["sandbox", "run", "--policy"])
        .arg(&policy)
        .args(["--", "sh", "-c", script])
        .output()
        .unwrap();
    let told = crate::bed::stdout(&ran);
    if told.is_empty() && crate::bed::said(&ran).contains("No module named pip") {
        return support::skip(test, &"there is no pip here");
    }
    let lines: Vec<&str> = told.lines().collect();
    assert!(
        lines.len() == 2 && lines[0].starts_with("six-") && lines[1] == "403",
        "{}",
        crate::bed::said(&ran)
    );
}

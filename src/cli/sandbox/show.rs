//! Sandboxes and what is in them, for people: sizes, times, tables, names as bytes.

use std::time::Duration;

use base64::Engine as _;
use prost_types::Timestamp;
use serde_json::{Value, json};

use crate::api::proto;
use crate::cli::report::{clean, clean_line};
use crate::clock;

/// A size as people read it: `512 B`, `1.5 MiB`.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // What would be written as `1024.0` is one of the next unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    let text = format!("{value:.1}");
    format!("{} {}", text.strip_suffix(".0").unwrap_or(&text), UNITS[unit])
}

/// A time span in its two largest parts: `3s`, `2m 5s`, `1h 10m`.
pub fn span(duration: Duration) -> String {
    let whole = Duration::from_secs(duration.as_secs());
    let text = humantime::format_duration(whole).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

pub fn millis(at: &Timestamp) -> clock::Timestamp {
    clock::Timestamp(
        at.seconds
            .saturating_mul(1000)
            .saturating_add(i64::from(at.nanos) / 1_000_000),
    )
}

/// How long ago that was; nothing for a time to come.
pub fn since(at: &Timestamp, now: clock::Timestamp) -> Duration {
    Duration::from_millis(u64::try_from(now.0.saturating_sub(millis(at).0)).unwrap_or(0))
}

/// How long it is until then; nothing for a time gone by.
pub fn until(at: &Timestamp, now: clock::Timestamp) -> Duration {
    Duration::from_millis(u64::try_from(millis(at).0.saturating_sub(now.0)).unwrap_or(0))
}

/// Seconds and nanoseconds of a message, as far as they make sense.
pub fn duration(duration: &prost_types::Duration) -> Duration {
    Duration::new(
        u64::try_from(duration.seconds).unwrap_or(0),
        u32::try_from(duration.nanos).unwrap_or(0).min(999_999_999),
    )
}

/// A name for people: as text, and harmless.
pub fn name(bytes: &[u8]) -> String {
    clean_line(&String::from_utf8_lossy(bytes))
}

/// A name for scripts: `field` as text, and where that loses something `field_base64` with the bytes.
pub fn named(object: &mut Value, field: &str, bytes: &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => object[field] = text.into(),
        Err(_) => {
            object[field] = String::from_utf8_lossy(bytes).into_owned().into();
            object[format!("{field}_base64")] = base64::engine::general_purpose::STANDARD.encode(bytes).into();
        }
    }
}

/// Columns, each as wide as its widest cell; the last one is left as it is.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|row| row.get(column));
        let widths = cells.map(|cell| cell.chars().count());
        widths.max().unwrap_or(0).max(head[column].chars().count())
    };
    let widths: Vec<usize> = (0..head.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:<width$}", width = *width))
            .collect();
        padded.join("  ").trim_end().to_owned() + "\n"
    };
    let mut text = line(&mut head.iter().copied());
    for row in rows {
        text += &line(&mut row.iter().map(String::as_str));
    }
    text
}

pub fn state(sandbox: &proto::Sandbox) -> &'static str {
    match sandbox.state() {
        proto::SandboxState::Unspecified => "-",
        proto::SandboxState::Creating => "creating",
        proto::SandboxState::Running => "running",
        proto::SandboxState::Paused => "paused",
        proto::SandboxState::Ending => "ending",
        proto::SandboxState::Ended => "ended",
    }
}

/// How a sandbox came to its end.
pub fn end(end: &proto::SandboxEnd) -> String {
    use proto::sandbox_end::Cause;
    let cause = match end.cause() {
        Cause::Unspecified => "for an unknown cause",
        Cause::Killed => "killed",
        Cause::Expired => "its time to live was up",
        Cause::Idle => "it was idle for too long",
        Cause::OutOfMemory => "out of memory",
        Cause::Lost => "lost",
        Cause::Shutdown => "the server shut down",
        Cause::CreateFailed => "it could not be made",
    };
    let by = if end.by.is_empty() {
        String::new()
    } else {
        format!(" by {}", end.by)
    };
    let why = if end.reason.is_empty() {
        String::new()
    } else {
        format!(": {}", end.reason)
    };
    clean_line(&format!("{cause}{by}{why}"))
}

/// All about one sandbox.
pub fn sandbox(sandbox: &proto::Sandbox, now: clock::Timestamp) -> String {
    let mut text = format!("{}  {}\n", clean_line(&sandbox.sandbox_id), state(sandbox));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            text += &format!("  {name:<10} {}\n", clean(&value));
        }
    };
    line("policy", format!("{} {}", sandbox.policy, sandbox.policy_hash));
    line("image", sandbox.image.clone());
    line(
        "backend",
        format!("{}, isolation {}", sandbox.backend, sandbox.isolation),
    );
    line("labels", labels(sandbox));
    if let Some(at) = &sandbox.created_at {
        let pool = if sandbox.from_pool { ", made ahead" } else { "" };
        line(
            "created",
            format!("{} ({} ago){pool}", millis(at), span(since(at, now))),
        );
    }
    if let (Some(at), None) = (&sandbox.expires_at, &sandbox.end) {
        line("expires", format!("{} (in {})", millis(at), span(until(at, now))));
    }
    if let Some(idle) = &sandbox.idle_timeout {
        line("idle", format!("ends after {} without use", span(duration(idle))));
    }
    line("lacks", sandbox.lacks.join(", "));
    if let Some(ended) = &sandbox.end {
        let at = ended
            .at
            .as_ref()
            .map(|at| format!("{}, ", millis(at)))
            .unwrap_or_default();
        line("ended", format!("{at}{}", end(ended)));
    }
    text
}

pub fn labels(sandbox: &proto::Sandbox) -> String {
    let mut labels: Vec<String> = sandbox
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    labels.sort();
    clean_line(&labels.join(","))
}

/// What goes with a command that has ended, for scripts.
pub fn ended(ended: &proto::ExecEnded) -> Value {
    use proto::exec_ended::Cause;
    let cause = match ended.cause() {
        Cause::Unspecified => json!({ "type": "unknown" }),
        Cause::Exited => json!({ "type": "exited", "code": ended.exit_code }),
        Cause::Signalled => json!({ "type": "signalled", "signal": ended.signal }),
        Cause::TimedOut => json!({ "type": "timed_out", "after_ms": ended.limit }),
        Cause::OutOfMemory => json!({ "type": "out_of_memory", "limit_bytes": ended.limit, "peak_bytes": ended.peak }),
        Cause::Killed => json!({ "type": "killed", "by": ended.by }),
        Cause::Disconnected => json!({ "type": "disconnected" }),
        Cause::SandboxKilled => json!({ "type": "sandbox_killed", "by": ended.by }),
        Cause::SandboxExpired => json!({ "type": "sandbox_expired" }),
        Cause::SandboxIdle => json!({ "type": "sandbox_idle" }),
        Cause::SandboxOutOfMemory => {
            json!({ "type": "sandbox_out_of_memory", "limit_bytes": ended.limit, "peak_bytes": ended.peak })
        }
        Cause::SandboxLost => json!({ "type": "sandbox_lost" }),
        Cause::SandboxShutdown => json!({ "type": "sandbox_shutdown" }),
    };
    let span = |given: &Option<prost_types::Duration>| given.as_ref().map(|given| duration(given).as_millis() as u64);
    let counts = |counts: &Option<proto::StreamCounts>| {
        let counts = counts.unwrap_or_default();
        json!({ "bytes": counts.bytes, "dropped_bytes": counts.dropped_bytes })
    };
    let pressure = ended.pressure.unwrap_or_default();
    json!({ "cause": cause, "reason": ended.reason, "duration_ms": span(&ended.duration), "cpu_ms": span(&ended.cpu),
        "max_rss_bytes": ended.max_rss_bytes, "killed_descendants": ended.killed_descendants,
        "kept_descendants": ended.kept_descendants, "stdout": counts(&ended.stdout), "stderr": counts(&ended.stderr),
        "pressure": { "oom_kills": pressure.oom_kills, "forks_refused": pressure.forks_refused,
            "pids_limit": pressure.pids_limit, "disk_full": pressure.disk_full,
            "disk_limit_bytes": pressure.disk_limit_bytes } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_spans_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1536, "1.5 KiB"),
            ((1 << 20) - 1, "1 MiB"),
            (512 << 20, "512 MiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        assert_eq!(span(Duration::from_millis(3_900)), "3s");
        assert_eq!(span(Duration::from_secs(3_725)), "1h 2m");
        assert_eq!(span(Duration::ZERO), "0s");
    }

    #[test]
    fn a_name_that_is_no_text_keeps_its_bytes_for_scripts() {
        let mut object = json!({});
        named(&mut object, "path", b"a\nb");
        named(&mut object, "link_target", b"\xff\x1b");
        assert_eq!(
            object,
            json!({ "path": "a\nb", "link_target": "\u{fffd}\u{1b}", "link_target_base64": "/xs=" })
        );
        assert_eq!(name(b"a\n\xff\x1b[2J"), "a\u{2424}\u{fffd}\u{fffd}[2J");
    }

    #[test]
    fn a_table_is_as_wide_as_it_must_be() {
        let rows = [
            vec!["a".to_owned(), "long one".to_owned()],
            vec!["bcde".to_owned(), String::new()],
        ];
        assert_eq!(table(&["X", "Y"], &rows), "X     Y\na     long one\nbcde\n");
    }

    #[test]
    fn a_sandbox_is_shown_whole() {
        let at = |seconds| Some(Timestamp { seconds, nanos: 0 });
        let mut sandbox = proto::Sandbox {
            sandbox_id: "sbx_a".into(),
            state: proto::SandboxState::Running.into(),
            policy: "default".into(),
            policy_hash: "ab12".into(),
            image: "host".into(),
            backend: "oci".into(),
            isolation: "container".into(),
            labels: [("b".to_owned(), "2".to_owned()), ("a".to_owned(), "1\u{1b}".to_owned())].into(),
            created_at: at(0),
            expires_at: at(3_600),
            idle_timeout: Some(prost_types::Duration { seconds: 90, nanos: 0 }),
            from_pool: true,
            lacks: vec!["pause".into()],
            ..Default::default()
        };
        insta::assert_snapshot!(self::sandbox(&sandbox, clock::Timestamp(60_000)));
        sandbox.state = proto::SandboxState::Ended.into();
        sandbox.end = Some(proto::SandboxEnd {
            cause: proto::sandbox_end::Cause::Killed.into(),
            by: "ada".into(),
            reason: "no longer needed".into(),
            at: at(120),
        });
        insta::assert_snapshot!(self::sandbox(&sandbox, clock::Timestamp(180_000)));
    }
}

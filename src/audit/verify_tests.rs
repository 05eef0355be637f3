//! Every way to tamper with a chain, on the pure walk, on the log and on the store.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::audit::files::Files;
use crate::audit::head;
use crate::audit::head::Signer;
use crate::audit::{Mirror, Record, read, seal, write};
use crate::clock::{self, Timestamp};
use crate::store::memory::Memory;

/// One way to tamper.
type Edit<T> = fn(&mut T);

fn record(n: u64) -> Record {
    Record {
        at: Timestamp(1_000 + n as i64),
        actor: format!("user:{n}"),
        action: "exec.ended".to_owned(),
        outcome: "ok".to_owned(),
        ids: BTreeMap::from([
            ("run".to_owned(), format!("run_{n}")),
            ("task".to_owned(), "t".to_owned()),
        ]),
        details: json!({ "argv": ["ls", n], "seconds": 0.25 * n as f64, "nested": { "null": null } }),
    }
}

fn chain(length: u64) -> Vec<Sealed> {
    let mut link = Link::start();
    let mut entries = Vec::new();
    for n in 1..=length {
        let entry = seal(&link, record(n));
        link = Link::of(&entry);
        entries.push(entry);
    }
    entries
}

fn walk(entries: &[Sealed], trusted: &[Link]) -> Option<(u64, Problem)> {
    let mut walk = Walk::new(trusted.to_vec());
    entries.iter().for_each(|entry| walk.push(Ok(entry.clone())));
    walk.finish(Source::Log).map(|broken| (broken.seq, broken.problem))
}

/// A data directory with a store of `length` entries, mirrored and signed after each.
struct Fixture {
    dir: tempfile::TempDir,
    files: Files,
    store: Memory,
    mirror: Mirror,
}

impl Fixture {
    async fn new(length: u64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let clock = clock::Manual::at(Timestamp(5_000));
        let store = Memory::new(Arc::new(clock.clone()));
        let mirror = Mirror::open(dir.path(), Arc::new(clock.clone())).unwrap();
        let this = Self {
            files: Files::of(dir.path()),
            dir,
            store,
            mirror,
        };
        for n in 1..=length {
            this.store.audit(vec![record(n)]).await.unwrap();
            clock.advance(Duration::from_secs(1));
            assert_eq!(this.mirror.catch_up(&this.store).await.unwrap().seq, n);
        }
        this
    }

    async fn verify(&self) -> Report {
        let input = Input {
            store: Some(&self.store),
            log: Some(self.files.log.clone()),
            heads: self.files.heads.clone(),
            key: PublicKey::of(&self.files).unwrap(),
            anchors: Vec::new(),
        };
        verify(&input).await.unwrap()
    }

    async fn first(&self) -> Option<(Source, u64, Problem)> {
        let report = self.verify().await;
        report
            .first()
            .map(|broken| (broken.source, broken.seq, broken.problem.clone()))
    }

    fn edit(path: &Path, edit: impl FnOnce(&mut Vec<String>)) {
        let text = fs::read_to_string(path).unwrap();
        let mut lines = text.lines().map(str::to_owned).collect();
        edit(&mut lines);
        fs::write(path, lines.iter().map(|line| format!("{line}\n")).collect::<String>()).unwrap();
    }

    fn edit_log(&self, edit: impl FnOnce(&mut Vec<String>)) {
        Self::edit(&self.files.log, edit);
    }

    fn edit_heads(&self, edit: impl FnOnce(&mut Vec<String>)) {
        Self::edit(&self.files.heads, edit);
    }

    fn edit_store(&self, edit: impl FnOnce(&mut Vec<String>)) {
        self.store.tamper(|_, audit| edit(audit));
    }
}

/// Makes entry `n` (and, as a thorough forger would, all behind it) anew with other content.
fn rewrite(lines: &mut [String], n: usize) {
    let mut link = match n {
        1 => Link::start(),
        n => Link::of(&read(&lines[n - 2]).unwrap()),
    };
    for line in &mut lines[n - 1..] {
        let mut record = read(line).unwrap().record;
        record.outcome = "forged".to_owned();
        let entry = seal(&link, record);
        link = Link::of(&entry);
        *line = write(&entry);
    }
}

#[tokio::test]
async fn an_untouched_log_is_whole() {
    let fixture = Fixture::new(5).await;
    let report = fixture.verify().await;
    let end = Link::of(&chain(5)[4]);
    assert_eq!(
        (report.store, report.log, report.heads),
        (Some(end.clone()), Some(end), 5)
    );
    assert_eq!((report.broken, report.notes), (vec![], vec![]));
    assert!(fixture.dir.path().join("audit/audit.jsonl").is_file());
}

#[test]
fn every_field_of_every_entry_is_covered() {
    let edits: [(&str, Edit<Sealed>); 13] = [
        ("format_version", |e| e.format_version += 1),
        ("seq", |e| e.seq += 1),
        ("at", |e| e.record.at.0 += 1),
        ("actor", |e| e.record.actor.push('x')),
        ("action", |e| e.record.action.push('x')),
        ("outcome", |e| e.record.outcome.clear()),
        ("an id", |e| {
            e.record.ids.insert("run".to_owned(), "other".to_owned());
        }),
        ("a further id", |e| {
            e.record.ids.insert("x".to_owned(), String::new());
        }),
        ("ids", |e| e.record.ids.clear()),
        ("a detail", |e| e.record.details["argv"][1] = json!("1")),
        ("details", |e| e.record.details = json!(null)),
        ("prev", |e| e.prev.replace_range(63.., "g")),
        ("hash", |e| e.hash.replace_range(63.., "g")),
    ];
    for n in 0..4 {
        for (field, edit) in edits {
            let mut entries = chain(4);
            edit(&mut entries[n]);
            assert_eq!(
                walk(&entries, &[]),
                Some((n as u64 + 1, Problem::Edited)),
                "{field} of {n}"
            );
        }
    }
}

#[test]
fn the_first_broken_entry_is_named_with_what_is_wrong() {
    let whole = chain(5);
    let tampered = |edit: fn(&mut Vec<Sealed>)| {
        let mut entries = whole.clone();
        edit(&mut entries);
        walk(&entries, &[Link::of(&whole[4])])
    };
    assert_eq!(tampered(|_| ()), None);
    assert_eq!(tampered(|e| drop(e.remove(1))), Some((2, Problem::Missing { next: 3 })));
    assert_eq!(tampered(|e| drop(e.remove(0))), Some((1, Problem::Missing { next: 2 })));
    assert_eq!(
        tampered(|e| drop(e.drain(1..3))),
        Some((2, Problem::Missing { next: 4 }))
    );
    assert_eq!(tampered(|e| e.swap(1, 2)), Some((2, Problem::Displaced { after: 3 })));
    assert_eq!(tampered(|e| e.swap(0, 4)), Some((1, Problem::Displaced { after: 5 })));
    assert_eq!(tampered(|e| e.insert(2, e[1].clone())), Some((2, Problem::Repeated)));
    assert_eq!(tampered(|e| e.push(e[0].clone())), Some((1, Problem::Repeated)));
    assert_eq!(tampered(|e| e.truncate(3)), Some((4, Problem::Cut { signed: 5 })));
    assert_eq!(tampered(|e| e.clear()), Some((1, Problem::Cut { signed: 5 })));
    // A forger who makes one entry anew is seen at the next one, one who makes all anew at the signed head.
    let one_anew = tampered(|e| e[2] = seal(&Link::of(&e[1]), record(9)));
    assert_eq!(one_anew, Some((4, Problem::Unlinked)));
    let last_anew = tampered(|e| e[4] = seal(&Link::of(&e[3]), record(9)));
    assert_eq!(last_anew, Some((5, Problem::NotAsSigned)));
}

#[tokio::test]
async fn an_edit_of_the_log_is_found() {
    let fixture = Fixture::new(4).await;
    let found = |seq, problem| Some((Source::Log, seq, problem));
    let untouched = fs::read_to_string(&fixture.files.log).unwrap();
    let cases: [(Edit<Vec<String>>, _); 6] = [
        (
            |lines| lines[2] = lines[2].replace("user:3", "user:4"),
            found(3, Problem::Edited),
        ),
        (|lines| drop(lines.remove(1)), found(2, Problem::Missing { next: 3 })),
        (|lines| lines.swap(1, 2), found(2, Problem::Displaced { after: 3 })),
        (|lines| lines.insert(1, lines[0].clone()), found(1, Problem::Repeated)),
        (|lines| lines.truncate(2), found(3, Problem::Cut { signed: 4 })),
        (|lines| rewrite(lines, 2), found(2, Problem::NotAsSigned)),
    ];
    for (n, (edit, expected)) in cases.into_iter().enumerate() {
        fixture.edit_log(edit);
        assert_eq!(fixture.first().await, expected, "case {n}");
        fs::write(&fixture.files.log, &untouched).unwrap();
    }
    // What the parser does not look at is covered too.
    fixture.edit_log(|lines| lines[0] = lines[0].replace(r#""seq":1"#, r#""seq":1,"note":"x""#));
    let rewritten = Problem::Unreadable {
        reason: "its text is not the one that was written".to_owned(),
    };
    assert_eq!(fixture.first().await, found(1, rewritten));
    // A log of its own making, beside an honest store.
    fs::write(&fixture.files.log, &untouched).unwrap();
    fixture.edit_heads(|lines| lines.clear());
    fixture.edit_log(|lines| rewrite(lines, 2));
    assert_eq!(fixture.first().await, Some((Source::Both, 2, Problem::Differs)));
    // One entry too many, well chained.
    fs::write(&fixture.files.log, &untouched).unwrap();
    fixture.edit_log(|lines| {
        let link = Link::of(&read(&lines[3]).unwrap());
        lines.push(write(&seal(&link, record(5))));
    });
    assert_eq!(fixture.first().await, Some((Source::Both, 5, Problem::NotInStore)));
    fs::remove_file(&fixture.files.log).unwrap();
    fixture.edit_heads(|lines| lines.clear());
    assert_eq!(fixture.first().await, None);
    assert_eq!(fixture.verify().await.notes.len(), 2);
}

#[tokio::test]
async fn an_edit_of_the_store_is_found() {
    let found = |seq, problem| Some((Source::Store, seq, problem));
    let unreadable = |reason: &str| Problem::Unreadable {
        reason: reason.to_owned(),
    };
    let edited = "audit entry 2 is damaged: its `seq` says 3";
    let newer = "audit entry 2 has format version 7; this build reads up to 1";
    let cases: [(Edit<Vec<String>>, _); 6] = [
        (
            |rows| rows[2] = rows[2].replace("user:3", "user:4"),
            found(3, Problem::Edited),
        ),
        (|rows| rows.swap(1, 2), found(2, unreadable(edited))),
        (|rows| drop(rows.remove(1)), found(2, unreadable(edited))),
        (|rows| rows.truncate(2), found(3, Problem::Cut { signed: 4 })),
        (|rows| rewrite(rows, 3), found(3, Problem::NotAsSigned)),
        // F2
        (
            |rows| rows[1] = rows[1].replace(r#""format_version":1"#, r#""format_version":7"#),
            found(2, unreadable(newer)),
        ),
    ];
    for (n, (edit, expected)) in cases.into_iter().enumerate() {
        let fixture = Fixture::new(4).await;
        fixture.edit_store(edit);
        assert_eq!(fixture.first().await, expected, "case {n}");
    }
}

#[tokio::test]
async fn a_store_and_log_cut_to_the_same_point_are_found_by_the_heads() {
    let fixture = Fixture::new(4).await;
    fixture.edit_log(|lines| lines.truncate(2));
    fixture.edit_store(|rows| rows.truncate(2));
    assert_eq!(
        fixture.first().await,
        Some((Source::Log, 3, Problem::Cut { signed: 4 }))
    );
    // Nor does the next catch-up or a regrown chain hide it.
    let catch_up = || fixture.mirror.catch_up(&fixture.store);
    assert!(matches!(catch_up().await, Err(Error::Diverged { seq: 4, .. })));
    fixture
        .store
        .audit((3..=6).map(|n| record(n + 10)).collect())
        .await
        .unwrap();
    assert!(matches!(catch_up().await, Err(Error::Diverged { seq: 4, .. })));
    assert_eq!(fixture.first().await.map(|(_, seq, _)| seq), Some(3));

    // With the heads cut too, this machine alone cannot tell; a head that was kept elsewhere can.
    let fixture = Fixture::new(4).await;
    let kept = head::newest(&fixture.files).unwrap().unwrap().link();
    fixture.edit_log(|lines| lines.truncate(2));
    fixture.edit_store(|rows| rows.truncate(2));
    fixture.edit_heads(|lines| lines.truncate(2));
    assert_eq!(fixture.first().await, None);
    let input = Input {
        store: Some(&fixture.store),
        log: Some(fixture.files.log.clone()),
        heads: fixture.files.heads.clone(),
        key: PublicKey::of(&fixture.files).unwrap(),
        anchors: vec![kept],
    };
    let report = verify(&input).await.unwrap();
    assert_eq!(
        report.first().map(|broken| &broken.problem),
        Some(&Problem::Cut { signed: 4 })
    );
}

#[tokio::test]
async fn what_no_good_head_vouches_for_is_said() {
    // A forger who can write the store but not sign: well chained, and not passed off as signed.
    let fixture = Fixture::new(2).await;
    fixture.store.audit(vec![record(3)]).await.unwrap();
    let report = fixture.verify().await;
    assert_eq!(report.broken, vec![]);
    assert_eq!(
        report.notes,
        [
            "entries 3 to 3 are newer than the newest signed head: nothing vouches yet that they are all there is",
            "the log does not have entries 3 to 3 of the store yet",
        ]
    );
    // With a head signed by a key of his own.
    let own = tempfile::tempdir().unwrap();
    let signer = Signer::open(&Files::of(own.path())).unwrap();
    let forged = signer.sign(&Link::of(&chain(3)[2]), Timestamp(1));
    fixture.edit_heads(|lines| lines.push(serde_json::to_string(&forged).unwrap()));
    assert_eq!(fixture.first().await, Some((Source::Heads, 3, Problem::Forged)));
    // With no head or no key at all.
    fs::remove_file(&fixture.files.heads).unwrap();
    assert!(
        fixture
            .verify()
            .await
            .notes
            .contains(&"no signed head: a cut tail cannot be excluded".to_owned())
    );
}

#[tokio::test]
async fn a_torn_line_is_no_proof_of_harm_unless_a_head_counts_it() {
    let fixture = Fixture::new(2).await;
    let whole = fs::read_to_string(&fixture.files.log).unwrap();
    fs::write(&fixture.files.log, format!("{whole}{{\"format_ver")).unwrap();
    let report = fixture.verify().await;
    assert_eq!((report.first(), report.notes.len()), (None, 1));
    fs::write(&fixture.files.log, &whole[..whole.len() - 1]).unwrap();
    assert_eq!(
        fixture.first().await,
        Some((Source::Log, 2, Problem::Cut { signed: 2 }))
    );
    // The store has it still: the next catch-up puts it back.
    fixture.mirror.catch_up(&fixture.store).await.unwrap();
    assert_eq!(fs::read_to_string(&fixture.files.log).unwrap(), whole);
    assert_eq!(fixture.first().await, None);
}

#[derive(Debug, Clone)]
enum Tamper {
    Delete(usize),
    Swap(usize, usize),
    Repeat(usize, usize),
    Truncate(usize),
    Renew(usize),
}

fn tamper(length: usize) -> impl Strategy<Value = Tamper> {
    let at = 0..length;
    prop_oneof![
        at.clone().prop_map(Tamper::Delete),
        (at.clone(), at.clone())
            .prop_filter("two places", |(a, b)| a != b)
            .prop_map(|(a, b)| Tamper::Swap(a, b)),
        (at.clone(), 0..=length).prop_map(|(a, b)| Tamper::Repeat(a, b)),
        at.clone().prop_map(Tamper::Truncate),
        at.prop_map(Tamper::Renew),
    ]
}

proptest! {
    #[test]
    fn any_single_mutation_of_a_signed_chain_is_found(tamper in tamper(8)) {
        let mut entries = chain(8);
        let signed = Link::of(&entries[7]);
        prop_assert_eq!(walk(&entries, std::slice::from_ref(&signed)), None);
        match tamper {
            Tamper::Delete(n) => drop(entries.remove(n)),
            Tamper::Swap(a, b) => entries.swap(a, b),
            Tamper::Repeat(from, to) => entries.insert(to, entries[from].clone()),
            Tamper::Truncate(length) => entries.truncate(length),
            Tamper::Renew(n) => {
                let before = n.checked_sub(1).map_or(Link::start(), |n| Link::of(&entries[n]));
                entries[n] = seal(&before, record(99));
            }
        }
        prop_assert!(walk(&entries, &[signed]).is_some());
    }

    #[test]
    fn any_changed_byte_of_a_signed_log_is_found(place: prop::sample::Index, by in 1_u8..=255) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let fixture = Fixture::new(2).await;
            let mut bytes = fs::read(&fixture.files.log).unwrap();
            let place = place.index(bytes.len());
            bytes[place] ^= by;
            fs::write(&fixture.files.log, bytes).unwrap();
            prop_assert!(fixture.first().await.is_some());
            Ok(())
        })?;
    }
}

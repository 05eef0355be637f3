//! The canonical form and its hash.

use super::*;

#[test]
fn equal_meaning_has_an_equal_hash() {
    let one = policy(
        "# a comment\ndescription = \"one\"\n[limits]\nmemory = \"1GiB\"\nwall_time = \"90m\"\ncpus = 2\n\
         [[tools.rules]]\nname=\"a\"\ntool=\"shell\"\nverdict=\"allow\"\n\
         [[tools.rules]]\nname=\"b\"\ntool=[\"search\",\"read_file\"]\nverdict=\"ask\"\nmatch={path_within=\"/workspace\"}\n",
    );
    let same = policy(
        "description = \"other\"\nisolation = \"container\"\n\
         [[tools.rules]]\nverdict=\"ask\"\ntool=[\"read_file\",\"search\",\"search\"]\nname=\"b\"\nmatch.path_within=\"/workspace/\"\n\
         [[tools.rules]]\nname=\"a\"\ntool=[\"shell\"]\nverdict=\"allow\"\n\
         [limits]\ncpus = 2.0\nmemory = \"1024 MiB\"\nwall_time = \"1h 30m\"\n[budgets]\nsteps = 100\n",
    );
    assert_eq!(one.hash(), same.hash());
    let base = "[limits]\nmemory = \"1GiB\"\n[[tools.rules]]\nname=\"a\"\ntool=\"shell\"\nverdict=\"allow\"\n";
    let mut hashes = std::collections::BTreeSet::new();
    for (from, to) in [
        ("", ""),
        ("1GiB", "1025MiB"),
        ("allow", "ask"),
        ("\"a\"", "\"b\""),
        ("shell", "search"),
        ("[limits]", "isolation = \"gvisor\"\n[limits]"),
        ("[limits]", "tools.default = \"ask\"\n[limits]"),
        ("[limits]", "[budgets]\ntokens = 1\n[limits]"),
        ("[limits]", "[approvals]\nexpires = \"2h\"\n[limits]"),
        ("[limits]", "mounts = [{source=\"/a\", target=\"/b\"}]\n[limits]"),
        ("[limits]", "image = \"docker:x\"\n[limits]"),
        ("\"allow\"", "\"allow\"\nmatch={command=\"x\"}"),
        ("\"allow\"", "\"allow\"\nreason=\"x\""),
    ] {
        hashes.insert(policy(&base.replacen(from, to, 1)).hash().to_owned());
    }
    assert_eq!(hashes.len(), 13, "each change of meaning changes the hash");
}

/// The stored format: this must stay readable, and the hash the same, for ever (requirement E4).
#[test]
fn a_snapshot_is_kept_and_read_back() {
    let parent = policy(
        "description = \"a parent\"\nmounts = [{source=\"/srv/a\", target=\"/opt/a\"}]\n[[tools.rules]]\nname=\"sh\"\ntool=\"*\"\nverdict=\"allow\"\n",
    );
    let policy = child(
        "backend = \"oci\"\n[limits]\nmemory = \"512MiB\"\n[[tools.rules]]\nname=\"rm\"\ntool=\"shell\"\nverdict=\"deny\"\n\
         reason=\"no\"\nmatch={command='rm .*', cwd='/.*'}\n[budgets]\ncost_usd = 1.5\n",
        &parent,
    )
    .unwrap();
    let snapshot = policy.snapshot();
    insta::assert_json_snapshot!(snapshot);
    assert_eq!(Policy::from_snapshot(&snapshot).unwrap(), policy);
    let text = serde_json::to_string(&policy).unwrap();
    assert_eq!(serde_json::from_str::<Policy>(&text).unwrap(), policy);
}

#[test]
fn a_snapshot_that_is_not_ours_is_refused() {
    let good = built_in("strict").snapshot();
    let changed = |pointer: &str, value: Value| {
        let mut snapshot = good.clone();
        *snapshot.pointer_mut(pointer).unwrap() = value;
        Policy::from_snapshot(&snapshot).unwrap_err().to_string()
    };
    assert_eq!(
        changed("/meaning/format_version", json!(2)),
        "the policy snapshot cannot be used: it has format version 2, this build reads 1"
    );
    assert!(changed("/meaning/limits/memory_bytes", json!(1_u64 << 40)).contains("its content has"));
    assert!(changed("/meaning/layers/0/rules/shell/verdict", json!("maybe")).contains("unknown variant"));
    assert!(changed("/notes/sources", json!([])).contains("do not fit"));
    assert!(Policy::from_snapshot(&json!({})).is_err());
}

/// A run that began before there were disk quotas and a second filter goes on under what it was told then.
#[test]
fn a_snapshot_from_before_disk_quotas_is_read_with_its_hash() {
    let stored: Value = serde_json::from_str(include_str!("before-disks.json")).unwrap();
    let policy = Policy::from_snapshot(&stored).unwrap();
    let limits = policy.limits();
    assert_eq!(
        (limits.disk, limits.disk_kind, limits.tmp_inodes, limits.shm_bytes),
        (None, None, 10_000, 64 << 20)
    );
    assert_eq!(policy.seccomp(), crate::sandbox::seccomp::Profile::Default);
    assert_eq!(policy.snapshot(), stored);
}

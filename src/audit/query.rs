//! Finding entries of the chain by what they are about.

use std::collections::VecDeque;

use super::{Error, Record, Sealed};
use crate::clock::Timestamp;
use crate::store::Store;

/// Which entries to find; what is `None` is not asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Filter {
    pub run: Option<String>,
    pub task: Option<String>,
    pub sandbox: Option<String>,
    /// How the action begins: `exec`, `policy.decided`.
    pub action: Option<String>,
    pub actor: Option<String>,
    /// Inclusive.
    pub since: Option<Timestamp>,
    /// Exclusive.
    pub until: Option<Timestamp>,
}

/// The newest entries that fit, oldest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Found {
    pub entries: Vec<Sealed>,
    /// Older ones that fit too, beyond the limit.
    pub left_out: u64,
}

impl Filter {
    pub fn fits(&self, record: &Record) -> bool {
        let names = |name: &str, wanted: &Option<String>| match wanted {
            Some(id) => record.ids.get(name) == Some(id),
            None => true,
        };
        names("run", &self.run)
            && names("task", &self.task)
            && names("sandbox", &self.sandbox)
            && self
                .action
                .as_ref()
                .is_none_or(|start| record.action.starts_with(start))
            && self.actor.as_ref().is_none_or(|actor| record.actor == *actor)
            && self.since.is_none_or(|since| record.at >= since)
            && self.until.is_none_or(|until| record.at < until)
    }
}

/// Reads the whole chain and keeps the newest `limit` entries that fit.
pub async fn find(store: &dyn Store, filter: &Filter, limit: usize) -> Result<Found, Error> {
    const PAGE: usize = 512;
    let mut kept = VecDeque::new();
    let mut left_out = 0;
    let mut after = 0;
    loop {
        let page = store.audit_log(after, PAGE).await.map_err(Error::Store)?;
        let Some(last) = page.last() else {
            break;
        };
        after = last.seq;
        for entry in page {
            if !filter.fits(&entry.record) {
                continue;
            }
            kept.push_back(entry);
            if kept.len() > limit {
                kept.pop_front();
                left_out += 1;
            }
        }
    }
    Ok(Found {
        entries: kept.into(),
        left_out,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;

    use super::*;
    use crate::clock;
    use crate::store::memory::Memory;

    fn record(at: i64, actor: &str, action: &str, run: &str) -> Record {
        Record {
            at: Timestamp(at),
            actor: actor.to_owned(),
            action: action.to_owned(),
            outcome: "ok".to_owned(),
            ids: BTreeMap::from([("run".to_owned(), run.to_owned())]),
            details: serde_json::Value::Null,
        }
    }

    #[tokio::test]
    async fn each_part_of_a_filter_counts() {
        let store = Memory::new(Arc::new(clock::System));
        let records = vec![
            record(10, "server", "exec.started", "a"),
            record(20, "server", "exec.ended", "a"),
            record(30, "user:x", "run.ended", "a"),
            record(40, "server", "exec.started", "b"),
        ];
        store.audit(records).await.unwrap();
        let text = |text: &str| Some(text.to_owned());
        let all = Filter::default();
        let cases = [
            (all.clone(), 10, vec![1, 2, 3, 4], 0),
            (all.clone(), 3, vec![2, 3, 4], 1),
            (all.clone(), 0, vec![], 4),
            (
                Filter {
                    run: text("a"),
                    ..all.clone()
                },
                2,
                vec![2, 3],
                1,
            ),
            (
                Filter {
                    task: text("a"),
                    ..all.clone()
                },
                10,
                vec![],
                0,
            ),
            (
                Filter {
                    action: text("exec"),
                    ..all.clone()
                },
                10,
                vec![1, 2, 4],
                0,
            ),
            (
                Filter {
                    actor: text("user:x"),
                    ..all.clone()
                },
                10,
                vec![3],
                0,
            ),
            (
                Filter {
                    since: Some(Timestamp(20)),
                    until: Some(Timestamp(40)),
                    ..all.clone()
                },
                10,
                vec![2, 3],
                0,
            ),
        ];
        for (filter, limit, seqs, left_out) in cases {
            let found = find(&store, &filter, limit).await.unwrap();
            let got: Vec<u64> = found.entries.iter().map(|entry| entry.seq).collect();
            assert_eq!((got, found.left_out), (seqs, left_out), "{filter:?}");
        }
    }
}

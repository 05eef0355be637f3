//! A run that is to go on where something is no longer what it was (requirement E4).

use std::time::Duration;

use serde_json::json;

use super::{World, pause, script, submission};
use crate::ids::RunId;
use crate::run::driver::Rest;
use crate::run::grounds::{Ground, Mismatch};
use crate::run::recording::Recording;
use crate::run::replay::replay;
use crate::run::service::Submission;
use crate::run::{Error, Event};
use crate::store::memory::When;
use crate::store::{Signal, Store};

fn task() -> Submission {
    submission(script(&[
        &[("write_file", json!({ "path": "a", "content": "1\n" }))],
        &[("shell", json!({ "command": "echo 2 >> a" }))],
        &[("finish", json!({ "summary": "done" }))],
    ]))
}

impl World {
    /// Makes believe that this was something else when the run began.
    async fn was_other(&self, run: &RunId, ground: Ground) {
        let grounds = self.state(run).await.grounds.unwrap();
        let field = |value: &str| format!("{}:{}", json!(ground.name()), json!(value));
        let (from, to) = (field(grounds.get(ground)), field("other"));
        self.store.tamper(|runs, _| {
            for run in runs {
                let texts = run.entries.iter_mut().chain(run.checkpoints.values_mut());
                texts.for_each(|text| *text = text.replace(&from, &to));
            }
        });
        let recorded = self.state(run).await.grounds.unwrap();
        assert_eq!(recorded.get(ground), "other");
    }

    /// As a client asks; gives the error of a refusal.
    async fn resume(&self, run: &RunId, accept: &[Ground]) -> Option<Error> {
        let service = self.service();
        let signal = Signal::Resume {
            by: "ann".into(),
            accept: accept.to_vec(),
        };
        let refused = service.signal(run.as_str(), signal).await.err();
        if refused.is_none() {
            service.settled(run).await.unwrap();
        }
        assert_eq!(service.shut_down(Duration::from_secs(10)).await, Vec::<String>::new());
        refused
    }

    async fn accepted(&self, run: &RunId) -> Vec<Mismatch> {
        let entries = self.entries(run).await.into_iter();
        let accepted = entries.filter_map(|entry| match entry.event {
            Event::Resumed { accepted, .. } => Some(accepted),
            _ => None,
        });
        accepted.flatten().collect()
    }
}

#[tokio::test(start_paused = true)]
async fn e4_a_paused_run_goes_on_only_where_it_stood_or_with_a_word_for_each_difference() {
    for ground in Ground::ALL {
        let world = World::new();
        let run = world.submit(task()).await;
        world.store.signal(&run, pause()).await.unwrap();
        assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Parked);
        world.was_other(&run, ground).await;
        let seq = world.state(&run).await.seq;

        let others: Vec<Ground> = Ground::ALL.into_iter().filter(|other| *other != ground).collect();
        for accept in [Vec::new(), others] {
            let refused = world.resume(&run, &accept).await.unwrap();
            assert_eq!(refused.reason(), ground.reason());
            let Error::Incompatible { mismatches, .. } = refused else {
                panic!("{refused:?}")
            };
            let [mismatch] = mismatches.as_slice() else {
                panic!("{mismatches:?}")
            };
            assert_eq!((mismatch.ground, mismatch.recorded.as_str()), (ground, "other"));
            assert_ne!(mismatch.found, "other");
        }
        assert_eq!(world.state(&run).await.seq, seq, "a refusal changes nothing");

        assert!(world.resume(&run, &[ground]).await.is_none(), "{ground}");
        let state = world.state(&run).await;
        assert_eq!(state.public(), "FINISHED");
        let accepted = world.accepted(&run).await;
        assert_eq!((accepted.len(), accepted[0].ground), (1, ground));
        assert_eq!(state.grounds.unwrap().get(ground), accepted[0].found);
        let audit = world.store.audit_log(0, 1000).await.unwrap();
        let resumed = audit
            .iter()
            .find(|sealed| sealed.record.action == "run.resumed")
            .unwrap();
        assert_eq!(resumed.record.details, json!({ "accepted": accepted }));
        let recording = Recording::of(&world.store, &world.store.run(&run).await.unwrap())
            .await
            .unwrap();
        assert_eq!(replay(&recording).unwrap(), None, "{ground}");
    }
}

/// One that goes on by itself, after a crash, is withheld and says why; it does not fail, and nothing runs meanwhile.
#[tokio::test(start_paused = true)]
async fn e4_a_run_that_was_cut_off_is_withheld_until_somebody_accepts_or_mends() {
    for mended in [false, true] {
        let world = World::new();
        let run = world.submit(task()).await;
        world.store.fail_at(6, When::After);
        world.process().drive(&run).await.unwrap_err();
        let before = world.state(&run).await.grounds.unwrap();
        world.was_other(&run, Ground::Tools).await;
        assert_eq!(world.process().drive(&run).await.unwrap(), Rest::Parked);
        let state = world.state(&run).await;
        assert_eq!(state.public(), "PAUSED");
        let withheld = [Mismatch {
            ground: Ground::Tools,
            recorded: "other".into(),
            found: before.tools.clone(),
        }];
        assert_eq!(state.withheld, withheld);
        let audit = world.store.audit_log(0, 1000).await.unwrap();
        let told = audit.iter().filter(|sealed| sealed.record.action == "run.withheld");
        assert_eq!(
            told.map(|sealed| sealed.record.outcome.as_str()).collect::<Vec<_>>(),
            ["refused"]
        );
        let accept = match mended {
            false => vec![Ground::Tools],
            true => {
                world.store.tamper(|runs, _| {
                    for run in runs {
                        let texts = run.entries.iter_mut().chain(run.checkpoints.values_mut());
                        let mended = format!("\"tools\":{}", json!(before.tools));
                        texts.for_each(|text| *text = text.replace("\"tools\":\"other\"", &mended));
                    }
                });
                Vec::new()
            }
        };
        assert!(world.resume(&run, &accept).await.is_none());
        let state = world.state(&run).await;
        assert_eq!((state.public(), state.withheld.len()), ("FINISHED", 0));
        assert_eq!(world.accepted(&run).await.len(), accept.len());
    }
}

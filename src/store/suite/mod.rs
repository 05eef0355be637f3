//! One suite for every store: what the trait promises, one case a test. [`store_suite!`] makes them for a [`Fixture`].
//!
//! `creating.rs`, `committing.rs`, `forking.rs`, `owning.rs` write; `reading.rs` reads back; `sample.rs` makes what is stored.

pub mod committing;
pub mod creating;
pub mod forking;
pub mod owning;
pub mod reading;
pub mod sample;

use std::sync::Arc;

use super::{Checkpoint, Pending, RunRecord, Store};
use crate::audit::Sealed;
use crate::ids::RunId;
use crate::run::Entry;

/// A store to test, empty at first.
pub trait Fixture {
    fn new() -> Self;

    /// The same data as another process would open it.
    fn open(&self) -> Arc<dyn Store>;

    /// Replaces a part of stored text behind the store's back.
    fn tamper(&self, row: Row<'_>, from: &str, to: &str);
}

/// A place where JSON is stored.
#[derive(Debug, Clone, Copy)]
pub enum Row<'a> {
    Entry(&'a RunId, u64),
    Checkpoint(&'a RunId, u64),
    Signal(&'a RunId),
    Audit(u64),
}

/// All that a store tells about one run, and the audit log.
#[derive(Debug, Clone, PartialEq)]
pub struct Picture {
    pub record: RunRecord,
    pub journal: Vec<Entry>,
    pub checkpoint: Checkpoint,
    pub inbox: Vec<Pending>,
    pub audit: Vec<Sealed>,
}

pub async fn picture(store: &dyn Store, run: &RunId) -> Picture {
    Picture {
        record: store.run(run).await.unwrap(),
        journal: store.journal(run, 0, usize::MAX).await.unwrap(),
        checkpoint: store.checkpoint(run, None).await.unwrap(),
        inbox: store.inbox(run).await.unwrap(),
        audit: store.audit_log(0, usize::MAX).await.unwrap(),
    }
}

macro_rules! store_suite {
    ($fixture:ty) => {
        store_suite! { $fixture:
            creating::a_new_task_is_there_whole,
            creating::the_same_key_and_body_give_the_same_task,
            creating::the_same_key_with_another_body_is_refused,
            creating::one_key_many_times_at_once_makes_one_task,
            creating::a_taken_id_is_refused,
            forking::a_fork_reads_its_beginning_from_its_parent,
            forking::a_fork_costs_the_same_whatever_lies_before_it,
            forking::a_recorded_run_is_there_whole,
            forking::a_fork_that_does_not_fit_is_refused,
            committing::a_commit_becomes_visible_as_one,
            committing::a_refused_commit_changes_nothing,
            committing::commits_of_many_runs_at_once_keep_to_themselves,
            committing::cancel_and_finish_race_to_one_end,
            committing::an_ended_run_takes_nothing_more,
            committing::two_instances_write_one_run_without_gap_or_double,
            owning::an_owner_that_was_taken_over_cannot_write,
            owning::a_claim_is_not_taken_from_the_living,
            owning::a_release_counts_for_its_own_fence_only,
            owning::of_many_claims_at_once_one_wins,
            reading::a_journal_pages_without_gap_or_double,
            reading::checkpoints_are_found_by_revision,
            reading::lists_page_and_filter,
            reading::unfinished_runs_are_listed_oldest_first,
            reading::an_inbox_keeps_its_order,
            reading::what_is_not_there_is_not_found,
            reading::an_unknown_format_version_is_refused_by_name,
            reading::what_cannot_be_read_is_damaged,
            reading::what_was_acknowledged_is_there_after_reopening,
            reading::the_data_version_tells_of_others,
        }
    };
    ($fixture:ty: $($module:ident :: $case:ident,)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                let fixture = <$fixture as $crate::store::suite::Fixture>::new();
                $crate::store::suite::$module::$case(fixture).await;
            }
        )*
    };
}
pub(crate) use store_suite;

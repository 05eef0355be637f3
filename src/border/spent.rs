//! What a run has used up at the borders of its sandboxes: it has one budget, however many sandboxes it has.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::egress::budget::{Budgets, Usage};
use crate::ids::RunId;

/// Runs that are remembered. Of more, any one begins anew.
const MOST: usize = 1 << 16;

/// By run, for the life of a server; clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Spent(Arc<Mutex<BTreeMap<RunId, Usage>>>);

impl Spent {
    /// What is left of the budgets.
    pub fn left(&self, run: Option<&RunId>, budgets: &Budgets) -> Budgets {
        let spent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(spent) = run.and_then(|run| spent.get(run)) else {
            return budgets.clone();
        };
        let minus = |most: Option<u64>, used: u64| most.map(|most| most.saturating_sub(used));
        Budgets {
            connections: minus(budgets.connections, spent.connections),
            sent: minus(budgets.sent, spent.sent),
            received: minus(budgets.received, spent.received),
            time: budgets.time.map(|most| most.saturating_sub(spent.time)),
            ..budgets.clone()
        }
    }

    /// Adds what one border has let through.
    pub fn add(&self, run: RunId, usage: Usage) {
        let mut spent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = spent.entry(run.clone()).or_insert(Usage {
            connections: 0,
            open: 0,
            sent: 0,
            received: 0,
            time: std::time::Duration::ZERO,
        });
        sum.connections += usage.connections;
        sum.sent += usage.sent;
        sum.received += usage.received;
        sum.time += usage.time;
        if spent.len() > MOST
            && let Some(any) = spent.keys().find(|other| **other != run).cloned()
        {
            spent.remove(&any);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_run_has_one_budget_for_all_its_sandboxes() {
        let budgets = Budgets {
            connections: Some(10),
            sent: Some(100),
            received: None,
            time: Some(Duration::from_secs(60)),
            ..Budgets::default()
        };
        let usage = Usage {
            connections: 2,
            open: 1,
            sent: 75,
            received: 7,
            time: Duration::from_secs(10),
        };
        let (spent, run) = (Spent::default(), RunId::random());
        assert_eq!(spent.left(Some(&run), &budgets), budgets);
        spent.add(run.clone(), usage);
        spent.add(run.clone(), usage);
        let left = Budgets {
            connections: Some(6),
            sent: Some(0),
            received: None,
            time: Some(Duration::from_secs(40)),
            ..Budgets::default()
        };
        assert_eq!(spent.left(Some(&run), &budgets), left);
        assert_eq!(spent.left(Some(&RunId::random()), &budgets), budgets);
        assert_eq!(spent.left(None, &budgets), budgets);
    }
}

//! Which commands of a sandbox ran beside which: for the judgement on what the sandbox's counters, which are for all, say of one.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The commands of one sandbox, as far as this server started them.
#[derive(Debug, Clone, Default)]
pub(in crate::sandbox) struct Company(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    running: usize,
    begun: u64,
    /// Something may have stayed that no command's end tells of.
    has_lasting: bool,
}

/// What of a command may outlive its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Lasting {
    Yes,
    No,
}

/// One command, from its beginning until this is dropped.
#[derive(Debug)]
pub(super) struct Stay {
    company: Company,
    number: u64,
    had_others: bool,
    lasting: Lasting,
}

impl Company {
    /// Of a sandbox that another server had: what it started may still run.
    pub fn unknown() -> Self {
        let counts = Counts {
            has_lasting: true,
            ..Counts::default()
        };
        Self(Arc::new(Mutex::new(counts)))
    }

    pub(super) fn join(&self, lasting: Lasting) -> Stay {
        let mut counts = self.counts();
        counts.begun += 1;
        let had_others = counts.running > 0 || counts.has_lasting;
        counts.running += 1;
        Stay {
            company: self.clone(),
            number: counts.begun,
            had_others,
            lasting,
        }
    }

    fn counts(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stay {
    /// Whether no other ran at any time since it began.
    pub fn is_alone(&self) -> bool {
        !self.had_others && self.company.counts().begun == self.number
    }

    /// It has ended; whether something of it lives on.
    pub fn end(&mut self, lasting: Lasting) {
        self.lasting = lasting;
    }
}

impl Drop for Stay {
    fn drop(&mut self) {
        let mut counts = self.company.counts();
        counts.running -= 1;
        counts.has_lasting |= self.lasting == Lasting::Yes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_alone_when_no_other_ran_at_any_time_of_its_life() {
        let company = Company::default();
        let first = company.join(Lasting::No);
        assert!(first.is_alone());
        let second = company.join(Lasting::No);
        assert!(!first.is_alone() && !second.is_alone());
        drop(second);
        assert!(!first.is_alone(), "it was not for a while");
        drop(first);
        let mut third = company.join(Lasting::Yes);
        assert!(third.is_alone());
        third.end(Lasting::No);
        drop(third);
        assert!(company.join(Lasting::Yes).is_alone());
        assert!(!company.join(Lasting::No).is_alone(), "the one before may still run");
    }
}

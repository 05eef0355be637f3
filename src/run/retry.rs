//! Whether what failed is tried again, and after how long. Pure: replay judges recorded runs by the same rules.

use std::time::Duration;

use crate::tool::world::Blame;

/// Attempts at one model call before the run fails.
const MODEL_ATTEMPTS: u32 = 5;
/// Attempts at one tool call, or check, that keeps ending its own sandbox. Of journals that name no culprit, all attempts.
const OWN_ATTEMPTS: u32 = 3;
/// Attempts at one tool call, or check, whose sandbox the host keeps losing: with the waits in between, more than five minutes.
const HOST_ATTEMPTS: u32 = 20;
/// The wait after the second loss by the host; it doubles with each. The first costs none: whatever was killed is made anew.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// Attempts of one step that were lost with their sandbox.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Losses {
    pub all: u32,
    /// Of these, those that the step's own program brought about.
    pub own: u32,
}

impl Losses {
    pub fn and(self, blame: Option<Blame>) -> Self {
        Self {
            all: self.all + 1,
            own: self.own + u32::from(blame == Some(Blame::Program)),
        }
    }

    /// How long the next attempt waits, so that a host in trouble is not asked in a tight loop.
    pub fn wait(self) -> Duration {
        match self.all - self.own {
            0 | 1 => Duration::ZERO,
            n => LONGEST_WAIT.min(FIRST_WAIT.saturating_mul(1 << (n - 2).min(16))),
        }
    }
}

/// Whether a model call that failed is made again, after `failures` of its kind.
pub fn has_another_model_call(is_retryable: bool, failures: u32) -> bool {
    is_retryable && failures + 1 < MODEL_ATTEMPTS
}

/// What follows on a try that lost its sandbox: whether there is another, and after how long. An older journal does not say when.
pub fn after(blame: Option<Blame>, is_retryable: bool, losses: Losses) -> (bool, Option<Duration>) {
    let retry = has_another_try(blame, is_retryable, losses);
    (retry, blame.filter(|_| retry).map(|_| losses.and(blame).wait()))
}

/// Whether what lost its sandbox is tried again, when `losses` came before this one. A journal that names no culprit was
/// written when three losses of any kind were the end.
fn has_another_try(blame: Option<Blame>, is_retryable: bool, losses: Losses) -> bool {
    let now = losses.and(blame);
    let is_left = match blame {
        None => now.all < OWN_ATTEMPTS,
        Some(Blame::Program) => now.own < OWN_ATTEMPTS,
        Some(Blame::Host) => now.all - now.own < HOST_ATTEMPTS,
    };
    is_retryable && is_left
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How a step ends whose attempts are lost like that, one after the other: attempts made, and seconds waited.
    fn ends(blames: impl IntoIterator<Item = Option<Blame>>) -> (u32, u64) {
        let (mut losses, mut waited) = (Losses::default(), Duration::ZERO);
        for blame in blames {
            let goes_on = has_another_try(blame, true, losses);
            losses = losses.and(blame);
            if !goes_on {
                break;
            }
            waited += losses.wait();
        }
        (losses.all, waited.as_secs())
    }

    #[test]
    fn a_host_in_trouble_has_minutes_and_a_program_three_times() {
        let always = |blame| std::iter::repeat_n(blame, 100);
        assert_eq!(ends(always(Some(Blame::Host))), (20, 321));
        assert_eq!(ends(always(Some(Blame::Program))), (3, 0));
        assert_eq!(ends(always(None)).0, 3, "as when it was written");
        // Neither uses up what the other has.
        let storm = std::iter::repeat_n(Some(Blame::Host), 5).chain(always(Some(Blame::Program)));
        assert_eq!(ends(storm).0, 5 + 3);
        let storm = std::iter::repeat_n(Some(Blame::Program), 2).chain(always(Some(Blame::Host)));
        assert_eq!(ends(storm), (2 + 20, 321));
        assert!(!has_another_try(Some(Blame::Host), false, Losses::default()));
    }
}

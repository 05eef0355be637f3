//! The table that all benchmarks print.

use std::fmt;
use std::time::{Duration, Instant};

use super::Result;

/// What was measured, in the order of first mention.
pub struct Table {
    cases: Vec<Case>,
    /// Between two cases; zero is a tight loop.
    gap: Duration,
}

struct Case {
    name: &'static str,
    /// The case that its ratio is taken to.
    base: &'static str,
    took: Vec<Duration>,
}

impl Table {
    /// An empty one, for cases with so much time between them.
    pub fn with_gap(gap: Duration) -> Self {
        Self { cases: Vec::new(), gap }
    }

    /// Runs and times `work`; the first round warms caches and is not counted.
    pub async fn time<T>(
        &mut self,
        round: usize,
        name: &'static str,
        base: &'static str,
        work: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::time::sleep(self.gap).await;
        let begun = Instant::now();
        let made = work.await.map_err(|error| format!("{name}: {error}"))?;
        self.note(round, name, base, begun.elapsed());
        Ok(made)
    }

    /// Takes down what was timed elsewhere.
    pub fn note(&mut self, round: usize, name: &'static str, base: &'static str, took: Duration) {
        if round == 0 {
            return;
        }
        let at = self.cases.iter().position(|case| case.name == name);
        let at = at.unwrap_or_else(|| {
            self.cases.push(Case {
                name,
                base,
                took: Vec::new(),
            });
            self.cases.len() - 1
        });
        self.cases[at].took.push(took);
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let profile = if cfg!(debug_assertions) {
            "without optimisation"
        } else {
            "optimised"
        };
        let rounds = self.cases.iter().map(|case| case.took.len()).max().unwrap_or(0);
        writeln!(
            f,
            "{rounds} rounds, {:?} between cases, this build {profile}; milliseconds\n",
            self.gap
        )?;
        writeln!(
            f,
            "{:52} {:>8} {:>8} {:>8} {:>9}  of",
            "", "p50", "p99", "least", "p50 is"
        )?;
        for case in &self.cases {
            let [p50, p99, least] = [50, 99, 0].map(|percent| quantile(&case.took, percent));
            let ms = |time: Option<Duration>| time.map_or(f64::NAN, |time| time.as_secs_f64() * 1e3);
            let base = self
                .cases
                .iter()
                .find(|other| other.name == case.base && case.name != case.base);
            let ratio = base.map_or(String::new(), |base| {
                format!("{:8.3}x  {}", ms(p50) / ms(quantile(&base.took, 50)), base.name)
            });
            writeln!(
                f,
                "{:52} {:8.2} {:8.2} {:8.2} {ratio}",
                case.name,
                ms(p50),
                ms(p99),
                ms(least)
            )?;
        }
        Ok(())
    }
}

/// The nearest rank.
fn quantile(took: &[Duration], percent: usize) -> Option<Duration> {
    let mut sorted = took.to_vec();
    sorted.sort();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

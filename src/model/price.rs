//! What a model costs. An unknown price gives an unknown cost, never 0.

use serde::{Deserialize, Serialize};

use super::Usage;

const MILLION: u128 = 1_000_000;

/// Prices in micro-USD for a million tokens (3 USD = 3,000,000).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Price {
    pub input: u64,
    /// For input that the provider had cached; without it that input costs as much as any other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cached: Option<u64>,
    pub output: u64,
}

/// The cost of `usage` in micro-USD, rounded up; unknown when the price is.
pub fn cost_micros(price: Option<&Price>, usage: Usage) -> Option<u64> {
    let price = price?;
    let cached = usage.cached_tokens.min(usage.input_tokens);
    let fresh = usage.input_tokens - cached;
    let sum = [
        (fresh, price.input),
        (cached, price.cached.unwrap_or(price.input)),
        (usage.output_tokens, price.output),
    ]
    .into_iter()
    .fold(0u128, |sum, (tokens, price)| {
        sum.saturating_add(u128::from(tokens) * u128::from(price))
    });
    Some(u64::try_from(sum.div_ceil(MILLION)).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(input: u64, cached: u64, output: u64) -> Usage {
        Usage {
            input_tokens: input,
            cached_tokens: cached,
            output_tokens: output,
            estimated: false,
        }
    }

    #[test]
    fn cached_input_has_its_own_price_and_an_unknown_price_no_cost() {
        let price = Price {
            input: 3_000_000,
            cached: Some(300_000),
            output: 15_000_000,
        };
        assert_eq!(cost_micros(Some(&price), usage(1_000, 800, 10)), Some(600 + 240 + 150));
        let flat = Price { cached: None, ..price };
        assert_eq!(cost_micros(Some(&flat), usage(1_000, 800, 10)), Some(3_000 + 150));
        assert_eq!(cost_micros(None, usage(1_000, 800, 10)), None);
    }

    #[test]
    fn costs_round_up_and_do_not_overflow() {
        let cheap = Price {
            input: 1,
            cached: None,
            output: 1,
        };
        assert_eq!(cost_micros(Some(&cheap), usage(1, 0, 0)), Some(1));
        assert_eq!(cost_micros(Some(&cheap), usage(0, 0, 0)), Some(0));
        let dear = Price {
            input: u64::MAX,
            cached: None,
            output: u64::MAX,
        };
        assert_eq!(cost_micros(Some(&dear), usage(u64::MAX, u64::MAX, 9)), Some(u64::MAX));
    }
}

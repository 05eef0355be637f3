//! Chance that can be had again.

use std::hash::{BuildHasher, Hasher, RandomState};

/// SplitMix64: the same seed gives the same kills.
pub struct Random(u64);

impl Random {
    /// From `EXUVIA_SEED`, or new; printed, so that a failure can be had again.
    pub fn new() -> Self {
        let given = std::env::var("EXUVIA_SEED").ok().map(|text| text.parse().unwrap());
        let seed = given.unwrap_or_else(|| RandomState::new().build_hasher().finish());
        eprintln!("EXUVIA_SEED={seed}");
        Self(seed)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % end
    }
}

//! The fleet over the fake backend, under paused time.

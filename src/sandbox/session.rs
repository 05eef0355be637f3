//! The life of one sandbox.

/// A sandbox that is up.
#[derive(Debug)]
pub struct Sandbox {}

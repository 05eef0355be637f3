//! SandboxService over the fake backend.

mod basics;
mod hand;

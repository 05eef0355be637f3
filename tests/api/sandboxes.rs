//! SandboxService over the fake backend.

mod basics;
mod commands;
mod files;
mod life;
mod places;
mod restart;

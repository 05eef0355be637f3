//! SandboxService over the fake backend; `memory` over gVisor.

mod basics;
mod commands;
mod files;
mod life;
mod memory;
mod places;
mod restart;

//! Exuvia.

pub mod guest;
pub mod wire;

#[cfg(feature = "host")]
pub mod api;
#[cfg(feature = "host")]
pub mod assembly;
#[cfg(feature = "host")]
pub mod audit;
#[cfg(feature = "host")]
pub mod chaos;
#[cfg(feature = "host")]
pub mod cli;
#[cfg(feature = "host")]
pub mod clock;
#[cfg(feature = "host")]
pub mod error;
#[cfg(feature = "host")]
pub mod ids;
#[cfg(feature = "host")]
pub mod model;
#[cfg(feature = "host")]
mod owner;
#[cfg(feature = "host")]
pub mod policy;
#[cfg(feature = "host")]
pub mod run;
#[cfg(feature = "host")]
pub mod sandbox;
#[cfg(feature = "host")]
pub mod secret;
#[cfg(feature = "host")]
pub mod store;
#[cfg(feature = "host")]
pub mod task;
#[cfg(feature = "host")]
pub mod tasks;
#[cfg(feature = "host")]
pub mod tool;
#[cfg(feature = "host")]
pub mod workspace;

//! A rule that asks: the connection or request waits, bounded, for somebody's word.

use std::fmt;

use async_trait::async_trait;

use super::journal::Channel;
use super::rules::RuleId;

/// Somebody who can be asked. Dropping the future takes the question back.
#[async_trait]
pub trait Ask: Send + Sync + fmt::Debug {
    async fn ask(&self, question: Question) -> Answer;
}

/// What a person has to know to decide.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Question {
    pub channel: Channel,
    pub host: String,
    pub port: u16,
    /// Nothing where a connection goes unopened: the answer is about all of it.
    pub method: Option<String>,
    pub path: Option<String>,
    pub rule: RuleId,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// This one.
    Once,
    /// This, and all that the same rule asks about the same host and port, for as long as the border stands.
    Always,
    No,
}

/// Nobody is there: every question is answered with no.
#[derive(Debug, Clone, Copy, Default)]
pub struct Nobody;

#[async_trait]
impl Ask for Nobody {
    async fn ask(&self, _question: Question) -> Answer {
        Answer::No
    }
}

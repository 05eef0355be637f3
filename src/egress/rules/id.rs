//! The one name of a rule: in the answer to the program, in the record, in the policy.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// The id of a rule, or of one of the border's own ([`builtin`]).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RuleId(Cow<'static, str>);

impl RuleId {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn is_builtin(&self) -> bool {
        self.0.starts_with(builtin::PREFIX)
    }
}

impl From<&str> for RuleId {
    fn from(text: &str) -> Self {
        Self(Cow::Owned(text.to_owned()))
    }
}

impl From<String> for RuleId {
    fn from(text: String) -> Self {
        Self(Cow::Owned(text))
    }
}

impl fmt::Display for RuleId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// What holds whatever a policy says.
pub mod builtin {
    use std::borrow::Cow;

    use super::RuleId;

    pub const PREFIX: &str = "builtin:";

    macro_rules! rules {
        ($($(#[$doc:meta])* $name:ident = $text:literal;)*) => {
            $($(#[$doc])* pub const $name: RuleId = RuleId(Cow::Borrowed(concat!("builtin:", $text)));)*
            /// All of them, for the documentation and its test.
            pub const ALL: &[RuleId] = &[$($name),*];
        };
    }

    rules! {
        /// No rule allows it.
        DEFAULT_DENY = "default-deny";
        /// The name or the address is written in a way that is not understood by everyone alike.
        HOST_FORM = "host-form";
        /// The address is in a closed block that no rule names.
        CLOSED_ADDRESS = "closed-address";
        /// The address is one of the host's own, or another that the operator closed.
        OFF_LIMITS = "off-limits";
        /// A protocol error that could be read in two ways.
        FRAMING = "framing";
        /// The name inside (SNI, `Host`, `:authority`) is not the name outside.
        SAME_NAME = "same-name";
        /// TLS was expected and something else came.
        TLS_EXPECTED = "tls-expected";
        /// The name inside is hidden (ECH), or there is none.
        HIDDEN_NAME = "hidden-name";
        /// TLS inside of TLS, or another tunnel inside of an opened one.
        NESTED_TUNNEL = "nested-tunnel";
        /// A method that the border does not carry.
        METHOD = "method";
        /// A placeholder was sent where it has no business.
        PLACEHOLDER_LEAK = "placeholder-leak";
        /// The value of a credential could not be had.
        CREDENTIAL = "credential";
        /// The answer came in an encoding that secrets could hide in.
        ENCODED_ANSWER = "encoded-answer";
        /// Kinds of DNS questions that are not answered.
        DNS_KIND = "dns-kind";
        /// A person said no, or nobody answered in time.
        ASK = "ask";
        /// The record could not be written.
        JOURNAL = "journal";
        BUDGET_CONNECTIONS = "budget:connections";
        BUDGET_CONCURRENCY = "budget:concurrency";
        BUDGET_SENT = "budget:bytes-up";
        BUDGET_RECEIVED = "budget:bytes-down";
        BUDGET_REQUESTS = "budget:requests-per-second";
        BUDGET_QUERIES = "budget:dns-per-second";
        BUDGET_TIME = "budget:time";
    }
}

//! The in-sandbox agent.

/// Runs the agent; never returns while the sandbox lives.
pub fn main() -> std::process::ExitCode {
    std::process::ExitCode::FAILURE
}

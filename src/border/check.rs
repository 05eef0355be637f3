//! What of a policy's network can be enforced for a sandbox. Where something is missing the sandbox is not made.

use super::Error;
use crate::policy::Policy;
use crate::policy::network::Mode;
use crate::sandbox::Capabilities;

/// # Errors
/// [`Error::Unsupported`], with what is missing.
pub fn check(policy: &Policy, able: &Capabilities) -> Result<(), Error> {
    let refused = |missing: String| {
        Err(Error::Unsupported {
            policy: policy.name().to_owned(),
            missing,
        })
    };
    let network = policy.network();
    if policy.credentials().iter().any(|credential| credential.exposed) {
        // Nothing takes its value out of what is stored and sent.
        return refused("`expose = \"env\"` of a credential is not enforced by this version".to_owned());
    }
    match network.mode() {
        Mode::None => return Ok(()),
        Mode::Proxy => {}
        Mode::Learn => return refused("`network.mode` `learn` is not enforced by this version".to_owned()),
    }
    if network.asks() {
        return refused("network rules with `verdict = \"ask\"` are not enforced by this version".to_owned());
    }
    let isolation = policy.isolation();
    if !able.borders.contains(&isolation) {
        let (name, mode) = (able.name, network.mode());
        return refused(format!(
            "`network.mode` `{mode}` is not enforced by the `{name}` backend with isolation `{isolation}` here; \
             isolation `container` has it"
        ));
    }
    Ok(())
}

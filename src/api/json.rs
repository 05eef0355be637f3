//! Messages as JSON, by the canonical mapping (protobuf.dev, "JSON Mapping"), with the fields' proto names, plain numbers
//! and states by their public names (`FINISHED`).

use std::sync::LazyLock;

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, SerializeOptions};
use serde_json::Value;

use super::proto;

static POOL: LazyLock<DescriptorPool> =
    LazyLock::new(|| DescriptorPool::decode(proto::DESCRIPTORS).expect("the build wrote these descriptors"));

/// An event as one JSON object.
pub fn event(event: &proto::Event) -> Value {
    let mut object = message("Event", event, Unset::LeftOut);
    for place in ["/state", "/ended/state"] {
        shorten(&mut object, place, "RUN_STATE_");
    }
    object
}

/// A sandbox as one JSON object.
pub fn sandbox(sandbox: &proto::Sandbox) -> Value {
    let mut object = message("Sandbox", sandbox, Unset::Shown);
    shorten(&mut object, "/state", "SANDBOX_STATE_");
    object
}

/// Whether fields that have their default value are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unset {
    LeftOut,
    Shown,
}

/// Any message of the API; `name` is its name without the package.
pub fn message(name: &str, message: &impl Message, unset: Unset) -> Value {
    let descriptor = POOL
        .get_message_by_name(&format!("exuvia.v1.{name}"))
        .expect("the build knows this message");
    let message = DynamicMessage::decode(descriptor, message.encode_to_vec().as_slice()).expect("it was just encoded");
    let options = SerializeOptions::new()
        .stringify_64_bit_integers(false)
        .use_proto_field_name(true)
        .skip_default_fields(unset == Unset::LeftOut);
    message
        .serialize_with_options(serde_json::value::Serializer, &options)
        .expect("a message is plain data")
}

/// Takes the prefix off an enum's value.
fn shorten(object: &mut Value, place: &str, prefix: &str) {
    if let Some(Value::String(state)) = object.pointer_mut(place) {
        *state = state.trim_start_matches(prefix).to_owned();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_reads_as_its_proto_says() {
        let kind = proto::event::Kind::Claimed(proto::Claimed {
            worker: "w".into(),
            fence: 3,
            ..Default::default()
        });
        let event = self::event(&proto::Event {
            seq: 2,
            run_id: "run_x".into(),
            kind: Some(kind),
            state: proto::RunState::Reasoning.into(),
            ..Default::default()
        });
        assert_eq!(
            event,
            serde_json::json!({ "seq": 2, "run_id": "run_x", "state": "REASONING", "claimed": { "worker": "w", "fence": 3 } })
        );
    }

    #[test]
    fn a_sandbox_shows_all_its_fields() {
        let sandbox = self::sandbox(&proto::Sandbox {
            sandbox_id: "sbx_x".into(),
            state: proto::SandboxState::Paused.into(),
            ..Default::default()
        });
        assert_eq!(
            (&sandbox["state"], &sandbox["from_pool"]),
            (&"PAUSED".into(), &false.into())
        );
        assert_eq!(sandbox.get("end"), None);
    }
}

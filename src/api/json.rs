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
    let descriptor = POOL
        .get_message_by_name("exuvia.v1.Event")
        .expect("the build knows this message");
    let message = DynamicMessage::decode(descriptor, event.encode_to_vec().as_slice()).expect("it was just encoded");
    let options = SerializeOptions::new()
        .stringify_64_bit_integers(false)
        .use_proto_field_name(true);
    let mut object = message
        .serialize_with_options(serde_json::value::Serializer, &options)
        .expect("a message is plain data");
    for place in ["/state", "/ended/state"] {
        if let Some(Value::String(state)) = object.pointer_mut(place) {
            *state = state.trim_start_matches("RUN_STATE_").to_owned();
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_reads_as_its_proto_says() {
        let kind = proto::event::Kind::Claimed(proto::Claimed {
            worker: "w".into(),
            fence: 3,
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
}

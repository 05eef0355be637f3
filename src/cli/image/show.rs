//! `image list`, `inspect`, `rm`, `gc`.

use std::fmt::Write;

use serde_json::json;

use crate::cli::report::clean_line;
use crate::cli::{Context, Error, Exit};
use crate::clock::{Clock, System};
use crate::sandbox::image::{Name, Removed, Store, Stored, StoredRef};

pub(super) fn size(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

pub(super) fn list(store: &Store, context: &Context) -> Result<Exit, Error> {
    let all = store.list()?;
    let mut text = String::new();
    let width = all
        .iter()
        .map(|(name, _)| name.as_str().len())
        .max()
        .unwrap_or_default();
    for (name, stored) in &all {
        let digest = &stored.digest.hex()[..12];
        let _ = writeln!(
            text,
            "{:width$}  {digest}  {:>10}  {}",
            name.as_str(),
            size(stored.bytes),
            clean_line(&stored.source)
        );
    }
    if all.is_empty() {
        text.push_str("no images; `exuvia image build images/python` makes one");
    }
    let images: Vec<_> = all
        .iter()
        .map(|(name, stored)| json!({ "name": name, "image": stored }))
        .collect();
    context.finish(&json!({ "images": images }), &text);
    Ok(Exit::Ok)
}

pub(super) fn inspect(image: &StoredRef, store: &Store, context: &Context) -> Result<Exit, Error> {
    let stored = store.get(image)?;
    context.finish(
        &json!({ "name": image.name, "image": stored }),
        &described(image, &stored),
    );
    Ok(Exit::Ok)
}

/// What an image says is its own word: control characters are taken out of it.
fn described(image: &StoredRef, stored: &Stored) -> String {
    let config = &stored.config;
    let mut text = format!(
        "name:       {}\ndigest:     {}\nplatform:   {}/{}\nlayers:     {}, {} entries, {}\nsource:     {}\nadded:      {}\n",
        image.name,
        stored.digest,
        clean_line(&config.os),
        clean_line(&config.architecture),
        stored.layers,
        stored.entries,
        size(stored.bytes),
        clean_line(&stored.source),
        stored.created_at,
    );
    let mut line = |label: &str, value: &str| {
        if !value.is_empty() {
            let _ = writeln!(text, "{label:11} {}", clean_line(value));
        }
    };
    line("workdir:", config.working_dir.as_deref().unwrap_or_default());
    line("user:", config.user.as_deref().unwrap_or_default());
    line("entrypoint:", &config.entrypoint.join(" "));
    line("command:", &config.cmd.join(" "));
    for (name, value) in &config.env {
        line("env:", &format!("{name}={value}"));
    }
    line("left out:", &config.env_left_out.join(", "));
    text.push_str(
        "Workdir, user, entrypoint and command are told only; of the environment, commands get what `env:` shows.\n",
    );
    text
}

pub(super) fn remove(names: &[Name], store: &Store, context: &Context) -> Result<Exit, Error> {
    let mut removed = Vec::new();
    let mut text = String::new();
    for name in names {
        let files = store.remove(name, System.now())?;
        let (files_gone, said) = match files {
            Removed::Files => (true, "removed"),
            Removed::NameOnly => (
                false,
                "its name is gone; the files are needed still, or were just now (`exuvia image gc`)",
            ),
        };
        removed.push(json!({ "name": name, "files_removed": files_gone }));
        let _ = writeln!(text, "{name}: {said}");
    }
    context.finish(&json!({ "removed": removed }), &text);
    Ok(Exit::Ok)
}

pub(super) fn collect(store: &Store, context: &Context) -> Result<Exit, Error> {
    let collected = store.collect(System.now())?;
    let text = format!(
        "{} images forgotten, {} unpacked roots removed, {}",
        collected.records,
        collected.roots,
        size(collected.bytes)
    );
    context.finish(
        &json!({ "records": collected.records, "roots": collected.roots, "bytes": collected.bytes }),
        &text,
    );
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Timestamp;
    use crate::sandbox::image::{Config, Digest};

    #[test]
    fn an_image_is_told_without_values_that_may_be_secret_or_control_the_terminal() {
        let stored = Stored {
            format_version: 1,
            digest: Digest::of(b"x"),
            chain: Digest::of(b"y"),
            layers: 2,
            entries: 10,
            bytes: 2048,
            config: Config {
                os: "linux".to_owned(),
                architecture: "amd64".to_owned(),
                env: [("PATH".to_owned(), "/bin".to_owned())].into(),
                env_left_out: vec!["TOKEN".to_owned()],
                cmd: vec!["sh\u{1b}[2J".to_owned()],
                ..Config::default()
            },
            source: "registry.example/x:1".to_owned(),
            created_at: Timestamp(0),
        };
        insta::assert_snapshot!(described(&"x:1".parse().unwrap(), &stored));
    }
}

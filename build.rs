//! Two jobs: generate the protobuf code, and (for the host) build the in-sandbox guest static and hand it to the crate.
//!
//! The guest is compiled by a nested cargo into a target folder of its own, with `--features guest` alone, so that the
//! host's dependencies can never leak into it. Nothing but the Rust toolchain and a C compiler is needed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    // Not CARGO_FEATURE_HOST: the nested build inherits the environment of this one.
    if cfg!(feature = "host") {
        generate(&out);
        println!("cargo::rustc-env=EXUVIA_SOURCE={}", source());
        println!("cargo::rustc-env=EXUVIA_WIRE_RS={}/exuvia.guest.v1.rs", out.display());
        println!("cargo::rustc-env=EXUVIA_FORGE_RS={}/exuvia.forge.v1.rs", out.display());
        build_guest(&out);
    } else {
        // The nested build: the host's build script has generated the frames already.
        for name in ["EXUVIA_WIRE_RS", "EXUVIA_FORGE_RS"] {
            println!("cargo::rerun-if-env-changed={name}");
            let generated = env::var(name).expect("the guest is built by `cargo build`, which sets it");
            println!("cargo::rerun-if-changed={generated}");
            println!("cargo::rustc-env={name}={generated}");
        }
    }
}

/// Which source this is: the commit, and whether what is built differs from it; `EXUVIA_COMMIT` speaks for a source without
/// its repository.
fn source() -> String {
    println!("cargo::rerun-if-env-changed=EXUVIA_COMMIT");
    if let Ok(named) = env::var("EXUVIA_COMMIT") {
        return named;
    }
    let root = env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR");
    let git = |words: &[&str]| {
        let output = Command::new("git").arg("-C").arg(&root).args(words).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim_end().to_owned())
    };
    let unknown = || "commit unknown".to_owned();
    // A repository around an unpacked source says nothing about it.
    let top = git(&["rev-parse", "--show-toplevel"]).and_then(|top| fs::canonicalize(top).ok());
    if top.is_none() || top != fs::canonicalize(&root).ok() {
        return unknown();
    }
    // A commit and a check-out write this; what staging writes is left out, or each would build everything again.
    if let Some(path) = git(&["rev-parse", "--path-format=absolute", "--git-path", "logs/HEAD"])
        && Path::new(&path).exists()
    {
        println!("cargo::rerun-if-changed={path}");
    }
    // What the program is made of.
    let parts = ["src", "proto", "policies", "build.rs", "Cargo.toml", "Cargo.lock"];
    for part in parts {
        println!("cargo::rerun-if-changed={part}");
    }
    let Some(commit) = git(&["rev-parse", "--short=12", "HEAD"]) else {
        return unknown();
    };
    match git(&[
        &["--no-optional-locks", "status", "--porcelain", "--"],
        parts.as_slice(),
    ]
    .concat())
    {
        Some(changes) if changes.is_empty() => commit,
        Some(_) => format!("{commit} with changes"),
        None => format!("{commit}, changes unknown"),
    }
}

#[cfg(feature = "host")]
fn generate(out: &Path) {
    println!("cargo::rerun-if-changed=proto");
    let files = [
        "exuvia/guest/v1/guest.proto",
        "exuvia/forge/v1/forge.proto",
        "exuvia/v1/task.proto",
        "exuvia/v1/sandbox.proto",
    ];
    let mut compiler = protox::Compiler::new(["proto"]).expect("the folder is there");
    if let Err(error) = compiler.include_imports(true).open_files(files) {
        panic!("{error:?}");
    }
    // For reflection.
    fs::write(
        out.join("exuvia_descriptors.bin"),
        compiler.encode_file_descriptor_set(),
    )
    .expect("OUT_DIR is writable");
    tonic_prost_build::configure()
        // Output is passed on without a copy.
        .bytes(".exuvia.guest.v1.Output.data")
        .bytes(".exuvia.guest.v1.FileReply.data")
        .bytes(".exuvia.guest.v1.Input.stdin")
        .bytes(".exuvia.v1.ExecOutput.data")
        .bytes(".exuvia.v1.FileChunk.data")
        .bytes(".exuvia.guest.v1.FileChunk.data")
        .compile_fds(compiler.file_descriptor_set())
        .expect("the protobuf files compile");
}

#[cfg(not(feature = "host"))]
fn generate(_: &Path) {}

fn build_guest(out: &Path) {
    for source in ["src/forge", "src/guest", "src/wire", "src/bin/guest.rs", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={source}");
    }
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("cargo sets CARGO_CFG_TARGET_ARCH");
    let triple = format!("{arch}-unknown-linux-gnu");
    let target_dir = out.join("guest-target");
    let status = Command::new(env::var_os("CARGO").expect("cargo sets CARGO"))
        .args([
            "build",
            "--locked",
            "--profile",
            "guest",
            "--no-default-features",
            "--features",
            "guest",
        ])
        .args(["--bin", "exuvia-guest", "--target", &triple, "--target-dir"])
        .arg(&target_dir)
        .current_dir(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"))
        .env("EXUVIA_WIRE_RS", out.join("exuvia.guest.v1.rs"))
        .env("EXUVIA_FORGE_RS", out.join("exuvia.forge.v1.rs"))
        // An explicit --target makes this a static-pie: no interpreter, so it runs in any rootfs.
        .env("RUSTFLAGS", "-C target-feature=+crt-static")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env_remove("RUSTC_WORKSPACE_WRAPPER")
        .env_remove("RUSTC_WRAPPER")
        .status()
        .expect("cargo runs");
    assert!(status.success(), "the guest does not build");
    let guest = target_dir.join(&triple).join("guest/exuvia-guest");
    let bytes = fs::read(&guest).expect("cargo leaves the guest there");
    assert_static(&bytes);
    fs::write(out.join("exuvia-guest"), bytes).expect("OUT_DIR is writable");
}

/// Refuses a guest that asks for a dynamic loader: it would not start in a foreign rootfs.
fn assert_static(elf: &[u8]) {
    let u16_at = |at: usize| u16::from_le_bytes(elf[at..at + 2].try_into().expect("two bytes"));
    let u64_at = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().expect("eight bytes")) as usize;
    let (table, size, count) = (u64_at(32), u16_at(54) as usize, u16_at(56) as usize);
    const PT_INTERP: u32 = 3;
    for header in (0..count).map(|n| table + n * size) {
        let kind = u32::from_le_bytes(elf[header..header + 4].try_into().expect("four bytes"));
        assert_ne!(kind, PT_INTERP, "the guest has an interpreter; it must be static");
    }
}

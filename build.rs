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
        println!("cargo::rustc-env=EXUVIA_WIRE_RS={}/exuvia.guest.v1.rs", out.display());
        build_guest(&out);
    } else {
        // The nested build: the host's build script has generated the frames already.
        println!("cargo::rerun-if-env-changed=EXUVIA_WIRE_RS");
        let wire = env::var("EXUVIA_WIRE_RS").expect("the guest is built by `cargo build`, which sets EXUVIA_WIRE_RS");
        println!("cargo::rerun-if-changed={wire}");
        println!("cargo::rustc-env=EXUVIA_WIRE_RS={wire}");
    }
}

#[cfg(feature = "host")]
fn generate(out: &Path) {
    println!("cargo::rerun-if-changed=proto");
    let files = [
        "exuvia/guest/v1/guest.proto",
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
        .compile_fds(compiler.file_descriptor_set())
        .expect("the protobuf files compile");
}

#[cfg(not(feature = "host"))]
fn generate(_: &Path) {}

fn build_guest(out: &Path) {
    for source in ["src/guest", "src/wire", "src/bin/guest.rs", "Cargo.lock"] {
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

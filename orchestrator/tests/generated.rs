//! The generated code of the protocol is checked in, so that building needs no protoc. This proves it current.

use std::path::{Path, PathBuf};

/// Where a package's code is, from the crate's folder.
fn checked_in(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Compares with what is checked in; with `UPDATE` in the environment, writes it.
fn prove(path: &str, fresh: &[u8]) {
    let path = checked_in(path);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, fresh).expect("the checked-in file can be written");
    }
    assert!(
        std::fs::read(&path).is_ok_and(|bytes| bytes == fresh),
        "{} is not what proto/ generates; run `UPDATE=1 cargo test -p ryzanstein-orchestrator --test generated` and commit \
         the result",
        path.display()
    );
}

fn generate() -> Vec<u8> {
    let folder = checked_in("proto");
    let files = protox::compile([folder.join("control.proto")], [&folder]).expect("the .proto compiles");
    let out = tempfile::tempdir().expect("a temporary folder");
    let builder = tonic_prost_build::configure().build_transport(false).bytes(".").out_dir(out.path());
    builder.compile_fds(files).expect("code is generated");
    std::fs::read(out.path().join("ryzanstein.control.v1.rs")).expect("the generated file")
}

#[test]
fn the_checked_in_code_is_what_control_proto_generates() {
    prove("src/control/generated.rs", &generate());
}

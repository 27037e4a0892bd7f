//! The generated code of the control protocol is checked in, so that building needs no protoc. This proves it current.

use std::path::Path;

#[test]
fn the_checked_in_code_is_what_control_proto_generates() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let proto = root.join("proto");
    let checked_in = root.join("src/control/generated.rs");

    let out = tempfile::tempdir().expect("a temporary folder");
    let descriptors =
        protox::compile([proto.join("control.proto")], [&proto]).expect("control.proto compiles");
    tonic_prost_build::configure()
        .build_transport(false)
        .bytes(".")
        .server_mod_attribute(".", "#[cfg(feature = \"server\")]")
        .out_dir(out.path())
        .compile_fds(descriptors)
        .expect("code is generated");
    let fresh =
        std::fs::read_to_string(out.path().join("ryzanstein.control.v1.rs")).expect("the generated file");

    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&checked_in, &fresh).expect("the checked-in file can be written");
    }
    assert!(
        std::fs::read_to_string(&checked_in).is_ok_and(|text| text == fresh),
        "src/control/generated.rs is not what proto/control.proto generates; run `UPDATE=1 cargo test -p \
         ryzanstein-orchestrator --test generated` and commit the result"
    );
}

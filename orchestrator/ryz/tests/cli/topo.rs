//! `ryz topo` as a user meets it: made-up machines as recorded, this machine, JSON, a drawing, and refusals.

use crate::support::{Run, report, text};

fn topo(arguments: &[&str]) -> String {
    let output = Run::new(&[&["topo"], arguments].concat(), &[]).finish();
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn presets_are_shown_as_recorded() {
    let recorded = [
        ("dgx-h100", include_str!("topo/dgx-h100.txt")),
        ("gb200-nvl72", include_str!("topo/gb200-nvl72.txt")),
        ("pcie-only", include_str!("topo/pcie-only.txt")),
        ("hybrid", include_str!("topo/hybrid.txt")),
    ];
    for (preset, recorded) in recorded {
        assert_eq!(topo(&["--preset", preset, "--columns", "80"]), recorded);
        assert!(recorded.lines().all(|line| line.chars().count() <= 80), "{preset}");
    }
    assert_eq!(topo(&["--sync-times", "--columns", "80"]), include_str!("topo/sync-times.txt"));
}

#[test]
fn json_has_a_way_from_every_device_to_every_other() {
    let output = Run::new(&["topo", "--preset", "hybrid", "--format", "json"], &[]).finish();
    let json = report(&output);
    let devices = json["devices"].as_array().expect("devices");
    let names: Vec<&str> = devices.iter().filter_map(|device| device["name"].as_str()).collect();
    assert_eq!(names, ["GPU0", "GPU1", "GPU2", "GPU3", "NIC0"]);
    assert_eq!(json["matrix"][4], serde_json::json!(["PIX", "NODE", "SYS", "SYS", "X"]));
    assert_eq!((&json["preset"], &json["no_gpus"]), (&"hybrid".into(), &serde_json::Value::Null));
    assert_eq!(json["numa_nodes"][1], serde_json::json!({ "id": 1, "processors": "32-63" }));
    assert!(json["tensor_parallel"].as_str().is_some_and(|advice| advice.starts_with("up to 2")), "{json}");

    let output = Run::new(&["topo", "--sync-times", "--ranks", "2", "--format", "json"], &[]).finish();
    let times = report(&output);
    assert_eq!((&times["ranks"], &times["models"][3]["bytes"]), (&2.into(), &700_000_000_000_u64.into()));
    assert_eq!(times["interconnects"][11]["seconds"].as_array().map(Vec::len), Some(4));
}

#[test]
fn this_machine_has_as_many_rows_as_devices() {
    let output = Run::new(&["topo", "--format", "json"], &[]).finish();
    let json = report(&output);
    let (devices, matrix) =
        (json["devices"].as_array().expect("devices"), json["matrix"].as_array().expect("a matrix"));
    assert_eq!(devices.len(), matrix.len());
    assert!(matrix.iter().all(|row| row.as_array().map(Vec::len) == Some(devices.len())), "{json}");
    assert_eq!(json["preset"], serde_json::Value::Null);
}

#[test]
fn what_cannot_be_shown_is_refused() {
    for (arguments, words) in [
        (&["--preset", "laptop"][..], &["invalid value 'laptop' for '--preset", "dgx-h100"][..]),
        (&["--ranks", "4"], &["--sync-times"]),
        (&["--sync-times", "--ranks", "0"], &["--ranks", "from 1 to 65536"]),
        (&["--sync-times", "--ranks", "99999999999"], &["--ranks", "from 1 to 65536"]),
    ] {
        let output = Run::new(&[&["topo"], arguments].concat(), &[]).finish();
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(2) && output.stdout.is_empty(), "{arguments:?}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }
}

use std::collections::HashMap;
use std::fs;

use proptest::prelude::*;
use safetensors::tensor::{Dtype as FileType, TensorView};
use tempfile::TempDir;

use super::*;

/// Returns the bytes of a small file: `w` f32 [4, 6] counts from 0, `b` bf16 [3] is 1, 2, 3, `n` i64 [2].
fn file() -> Vec<u8> {
    let w: Vec<u8> = (0..24u8).flat_map(|i| f32::from(i).to_le_bytes()).collect();
    let b: Vec<u8> = [1.0, 2.0, 3.0].iter().flat_map(|x| half::bf16::from_f32(*x).to_le_bytes()).collect();
    let n = [0u8; 16];
    let tensors = HashMap::from([
        ("w", TensorView::new(FileType::F32, vec![4, 6], &w).unwrap()),
        ("b", TensorView::new(FileType::BF16, vec![3], &b).unwrap()),
        ("n", TensorView::new(FileType::I64, vec![2], &n).unwrap()),
    ]);
    safetensors::serialize(tensors, None).unwrap()
}

fn folder(files: &[(&str, &[u8])]) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(folder.path().join(name), content).unwrap();
    }
    folder
}

fn refusal(files: &[(&str, &[u8])]) -> String {
    Checkpoint::open(folder(files).path()).unwrap_err().to_string()
}

fn with_header(json: &str, data: &[u8]) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes(), json.as_bytes(), data].concat()
}

#[test]
fn slices_hold_the_rows_and_columns_asked_for_and_their_bytes_are_counted() {
    let folder = folder(&[(SINGLE, &file())]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((checkpoint.total_bytes(), checkpoint.bytes_read()), (24 * 4 + 6 + 16, 0));

    let mut rows = Tensor::zeros(&[3, 6], DType::F32).unwrap();
    checkpoint.read_into("w", &[4, 6], 1..3, 0..6, &mut rows, 1).unwrap();
    assert_eq!(rows.values().unwrap()[..6], [0.0; 6]);
    assert_eq!(rows.values().unwrap()[6..], (6..18u8).map(f32::from).collect::<Vec<_>>());
    assert_eq!(checkpoint.bytes_read(), 2 * 6 * 4);

    let mut columns = Tensor::zeros(&[4, 2], DType::BF16).unwrap();
    checkpoint.read_into("w", &[4, 6], 0..4, 2..4, &mut columns, 0).unwrap();
    assert_eq!(*columns.values().unwrap(), [2.0, 3.0, 8.0, 9.0, 14.0, 15.0, 20.0, 21.0]);
    assert_eq!(checkpoint.bytes_read(), 2 * 6 * 4 + 4 * 2 * 4);

    let mut vector = Tensor::zeros(&[2], DType::F32).unwrap();
    checkpoint.read_into("b", &[3], 1..3, 0..1, &mut vector, 0).unwrap();
    assert_eq!(*vector.values().unwrap(), [2.0, 3.0]);
}

#[test]
fn every_conversion_rounds_once_to_the_nearest() {
    let x = 1.0 + 1.0 / 256.0 + 1.0 / 4096.0;
    let b = f32::to_le_bytes(x);
    let stored = StoredMatrix { bytes: &b, dtype: DType::F32, columns: 1 };
    for dtype in [DType::F16, DType::BF16, DType::F32] {
        let mut target = Tensor::zeros(&[1], dtype).unwrap();
        slice::copy(stored, 0..1, &(0..1), &mut target, 0).unwrap();
        assert_eq!(
            (target.dtype(), target.values().unwrap()[0]),
            (dtype, Tensor::new(&[1], vec![x], dtype).unwrap().values().unwrap()[0])
        );
    }
}

#[test]
fn ranges_that_do_not_fit_are_refused() {
    let folder = folder(&[(SINGLE, &file())]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let mut target = Tensor::zeros(&[2, 6], DType::F32).unwrap();
    assert!(checkpoint.read_into("w", &[4, 6], 3..5, 0..6, &mut target, 0).is_err());
    assert!(checkpoint.read_into("w", &[4, 6], 0..2, 0..6, &mut target, 1).is_err());
    assert!(checkpoint.read_into("w", &[4, 6], 0..2, 1..6, &mut target, 0).is_err());
    assert!(checkpoint.read_into("w", &[4, 6], 0..2, 0..6, &mut target, usize::MAX).is_err());
    assert_eq!(checkpoint.bytes_read(), 0);
}

#[test]
fn a_tensor_of_another_shape_type_or_name_is_refused_with_both_said() {
    let folder = folder(&[(SINGLE, &file())]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let reason = |name, shape: &[usize]| checkpoint.check(name, shape).unwrap_err().to_string();
    let shape = reason("w", &[6, 4]);
    assert!(shape.contains("model.safetensors: tensor `w`: expected shape [6, 4], found [4, 6]"), "{shape}");
    assert!(reason("n", &[2]).contains("tensor `n`: expected type F32, F16 or BF16, found I64"));
    assert!(reason("v", &[2]).contains("tensor `v`: it is in none of the weight files"));
    assert_eq!(checkpoint.common_dtype(["w"]).unwrap(), DType::F32);
    assert_eq!(checkpoint.common_dtype(["b"]).unwrap(), DType::BF16);
    assert_eq!(checkpoint.common_dtype(["b", "w"]).unwrap(), DType::F32);
}

#[test]
fn an_index_names_files_of_its_own_folder_only() {
    for name in ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a/"] {
        let index = serde_json::json!({ "weight_map": { "w": name } }).to_string();
        let reason = refusal(&[(INDEX, index.as_bytes())]);
        assert!(reason.contains("no plain file name"), "{name}: {reason}");
    }
}

#[test]
fn an_index_joins_files_and_says_what_is_not_where_it_should_be() {
    let other = with_header(r#"{"v":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#, &[0, 0]);
    let index = |map: &str| format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#);
    let (file, both) = (file(), index(r#"{"w":"one.safetensors","v":"two.safetensors"}"#));
    let whole = folder(&[("one.safetensors", &file), ("two.safetensors", &other), (INDEX, both.as_bytes())]);
    let checkpoint = Checkpoint::open(whole.path()).unwrap();
    assert!(checkpoint.check("v", &[1]).is_ok() && checkpoint.check("w", &[4, 6]).is_ok());

    let missing = refusal(&[("one.safetensors", &file), (INDEX, both.as_bytes())]);
    assert!(missing.contains("two.safetensors"), "{missing}");
    let elsewhere = index(r#"{"v":"one.safetensors"}"#);
    let reason = refusal(&[("one.safetensors", &file), (INDEX, elsewhere.as_bytes())]);
    assert!(reason.contains("tensor `v`: it is not in `one.safetensors`"), "{reason}");
    assert!(refusal(&[(INDEX, b"[]")]).contains("no index of weights"));
    assert!(refusal(&[]).contains("neither model.safetensors nor"));
}

#[test]
fn a_header_that_has_a_name_twice_is_refused() {
    let entry = r#""v":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}"#;
    let reason = refusal(&[(SINGLE, &with_header(&format!("{{{entry},{entry}}}"), &[0, 0]))]);
    assert!(reason.contains("tensor `v`: the header has this name twice"), "{reason}");
}

#[test]
fn a_pointer_that_git_left_in_place_of_the_weights_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    let reason = refusal(&[(SINGLE, pointer.as_bytes())]);
    assert!(reason.contains("Git LFS pointer") && reason.contains("git lfs pull"), "{reason}");
}

#[test]
fn damaged_files_are_refused_with_the_reason() {
    let file = file();
    let cut = refusal(&[(SINGLE, &file[..file.len() - 1])]);
    assert!(cut.contains("truncated"), "{cut}");
    assert!(refusal(&[(SINGLE, &file[..40])]).contains("truncated"));
    assert!(refusal(&[(SINGLE, &[])]).contains("the file is empty"));
    assert!(refusal(&[(SINGLE, &[1, 2])]).contains("no safetensors file"));
    assert!(refusal(&[(SINGLE, &u64::MAX.to_le_bytes())]).contains("so long a header"));
    assert!(refusal(&[(SINGLE, &[&file[..], &[0]].concat())]).contains("belong to no tensor"));

    let bad =
        |entry: &str, data: &[u8]| refusal(&[(SINGLE, &with_header(&format!(r#"{{"x":{entry}}}"#), data))]);
    assert!(bad(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, &[0; 4]).contains("does not fill"));
    assert!(
        bad(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#, &[0; 4]).contains("before they start")
    );
    assert!(bad(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#, &[0; 8]).contains("should start at"));
    assert!(bad(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#, &[0; 4]).contains("tensor `x`"));
    let huge = r#"{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}"#;
    assert!(bad(huge, &[]).contains("does not fill"));
    let far = format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":[{0},{0}]}}"#, u64::MAX);
    assert!(bad(&far, &[]).contains("truncated"));
}

proptest! {
    /// Opens, checks and reads everything in a file. Only a panic fails the test.
    #[test]
    fn no_damage_makes_reading_panic(
        keep in 0.0..=1.0f64,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        digits in prop::collection::vec((any::<prop::sample::Index>(), b'0'..=b'9'), 0..3),
    ) {
        let mut bytes = file();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        // Replacing digits by digits leaves valid JSON with wrong shapes and ranges.
        let places: Vec<_> = (8..header).filter(|i| bytes[*i].is_ascii_digit()).collect();
        for (place, digit) in digits {
            bytes[places[place.index(places.len())]] = digit;
        }
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate((bytes.len() as f64 * keep).ceil() as usize);
        let folder = folder(&[(SINGLE, &bytes)]);
        if let Ok(checkpoint) = Checkpoint::open(folder.path()) {
            for name in checkpoint.names() {
                let mut target = Tensor::zeros(&[4, 6], DType::F32).unwrap();
                let _ = checkpoint.read_into(name, &[4, 6], 0..4, 0..6, &mut target, 0);
            }
        }
    }

    #[test]
    fn no_index_makes_opening_panic(text in ".{0,60}", name in ".{0,12}") {
        let index = serde_json::json!({ "weight_map": { "w": name } }).to_string();
        let _ = Checkpoint::open(folder(&[(INDEX, index.as_bytes())]).path());
        let _ = Checkpoint::open(folder(&[(INDEX, text.as_bytes())]).path());
    }
}

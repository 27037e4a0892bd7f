use std::collections::HashMap;
use std::fs;

use proptest::prelude::*;
use ryzanstein_process_group::Rank;
use safetensors::tensor::{Dtype as FileType, TensorView};
use tempfile::TempDir;

use super::*;
use crate::testing::on_loopback;

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

fn slice<'a>(
    name: &'a str,
    shape: &'a [usize],
    rows: Range<usize>,
    columns: Range<usize>,
) -> TensorSlice<'a> {
    TensorSlice { name, shape, rows, columns }
}

#[test]
fn slices_hold_the_rows_and_columns_asked_for_and_their_bytes_are_counted() {
    let folder = folder(&[(SINGLE, &file())]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    assert_eq!((checkpoint.total_bytes(), checkpoint.bytes_read()), (24 * 4 + 6 + 16, 0));

    let mut rows = Tensor::zeros(&[3, 6], DType::F32).unwrap();
    checkpoint.read_into(&slice("w", &[4, 6], 1..3, 0..6), &mut rows, 1).unwrap();
    assert_eq!(rows.values().unwrap()[..6], [0.0; 6]);
    assert_eq!(rows.values().unwrap()[6..], (6..18u8).map(f32::from).collect::<Vec<_>>());
    assert_eq!(checkpoint.bytes_read(), 2 * 6 * 4);

    let mut columns = Tensor::zeros(&[4, 2], DType::BF16).unwrap();
    checkpoint.read_into(&slice("w", &[4, 6], 0..4, 2..4), &mut columns, 0).unwrap();
    assert_eq!(*columns.values().unwrap(), [2.0, 3.0, 8.0, 9.0, 14.0, 15.0, 20.0, 21.0]);
    assert_eq!(checkpoint.bytes_read(), 2 * 6 * 4 + 4 * 2 * 4);

    let mut vector = Tensor::zeros(&[2], DType::F32).unwrap();
    checkpoint.read_into(&slice("b", &[3], 1..3, 0..1), &mut vector, 0).unwrap();
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
    assert!(checkpoint.read_into(&slice("w", &[4, 6], 3..5, 0..6), &mut target, 0).is_err());
    assert!(checkpoint.read_into(&slice("w", &[4, 6], 0..2, 0..6), &mut target, 1).is_err());
    assert!(checkpoint.read_into(&slice("w", &[4, 6], 0..2, 1..6), &mut target, 0).is_err());
    assert!(checkpoint.read_into(&slice("w", &[4, 6], 0..2, 0..6), &mut target, usize::MAX).is_err());
    assert_eq!(checkpoint.bytes_read(), 0);
    let tensors = HashMap::from([("w".to_owned(), Tensor::zeros(&[4, 6], DType::BF16).unwrap())]);
    let mut source = MemorySource { tensors: &tensors };
    assert!(source.fill(&slice("w", &[4, 6], 3..5, 0..6), &mut target, 0).is_err());
    assert!(source.fill(&slice("w", &[4, 6], 0..2, 0..5), &mut target, 0).is_err());
    assert!(source.fill(&slice("w", &[4, 6], 0..2, 0..6), &mut target, 1).is_err());
    assert!(source.fill(&slice("w", &[4, 6], 2..4, 0..6), &mut target, 0).is_ok());
}

#[test]
fn a_tensor_of_another_shape_type_or_name_is_refused_with_both_said() {
    let folder = folder(&[(SINGLE, &file())]);
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let reason = |name, shape: &[usize]| checkpoint.check(name, shape).unwrap_err().to_string();
    let shape = reason("w", &[6, 4]);
    let expected =
        "model.safetensors: tensor `w`: expected shape [6, 4], found [4, 6]; is config.json that of";
    assert!(shape.contains(expected), "{shape}");
    assert!(reason("n", &[2]).contains("tensor `n`: expected type F32, F16 or BF16, found I64"));
    assert!(reason("v", &[2]).contains("tensor `v`: it is in none of the weight files"));
    assert_eq!(checkpoint.common_dtype(["w"]).unwrap(), DType::F32);
    assert_eq!(checkpoint.common_dtype(["b"]).unwrap(), DType::BF16);
    assert_eq!(checkpoint.common_dtype(["b", "w"]).unwrap(), DType::F32);
    for (dtype, size) in [("I8", 1), ("F64", 8), ("F8_E4M3", 1), ("I32", 4), ("F33", 4), ("f32", 4)] {
        let header = format!(r#"{{"x":{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,{size}]}}}}"#);
        let folder = self::folder(&[(SINGLE, &with_header(&header, &vec![0; size]))]);
        let reason = Checkpoint::open(folder.path()).unwrap().check("x", &[1]).unwrap_err().to_string();
        assert!(
            reason.contains(&format!("tensor `x`: expected type F32, F16 or BF16, found {dtype}")),
            "{reason}"
        );
    }
}

#[test]
fn an_index_names_files_of_its_own_folder_only() {
    for name in ["../model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".", "", "a/"] {
        let index = serde_json::json!({ "weight_map": { "w": name } }).to_string();
        let reason = refusal(&[(INDEX, index.as_bytes())]);
        assert!(reason.contains("no plain file name"), "{name}: {reason}");
    }
}

/// Returns a file with a tensor `v`, f16 [1], of these bytes.
fn one(value: [u8; 2]) -> Vec<u8> {
    with_header(r#"{"v":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}"#, &value)
}

fn index(map: &serde_json::Value) -> Vec<u8> {
    serde_json::json!({ "metadata": {}, "weight_map": map }).to_string().into_bytes()
}

#[test]
fn an_index_chooses_files_whose_headers_say_what_they_have() {
    let (file, other) = (file(), one([0, 0]));
    let open = |map: &serde_json::Value| {
        let index = index(map);
        let files = [("one.safetensors", &file[..]), ("two.safetensors", &other), (INDEX, &index)];
        let folder = folder(&files);
        (Checkpoint::open(folder.path()).unwrap(), folder)
    };
    // As in transformers, a tensor may be in another file, or nowhere, until it is needed.
    for map in [
        serde_json::json!({ "w": "one.safetensors", "v": "two.safetensors" }),
        serde_json::json!({ "w": "two.safetensors", "v": "one.safetensors" }),
        serde_json::json!({ "w": "one.safetensors", "x": "two.safetensors" }),
    ] {
        let (checkpoint, _folder) = open(&map);
        assert!(checkpoint.check("v", &[1]).is_ok() && checkpoint.check("w", &[4, 6]).is_ok(), "{map}");
        let missing = checkpoint.check("x", &[1]).unwrap_err().to_string();
        let reason = if map.get("x").is_some() {
            "index.json: tensor `x`: it is not in `two.safetensors`"
        } else {
            "tensor `x`: it is in none of the weight files"
        };
        assert!(missing.contains(reason), "{missing}");
    }
    // A file that the index does not name is not read.
    let (checkpoint, _folder) = open(&serde_json::json!({ "w": "one.safetensors" }));
    let missing = checkpoint.check("v", &[1]).unwrap_err().to_string();
    assert!(missing.contains("Files of this folder that were not read: two.safetensors"), "{missing}");
}

#[test]
fn an_index_that_is_none_or_names_what_is_not_there_is_refused_with_its_entry() {
    let refused = |map: serde_json::Value| refusal(&[("one.safetensors", &file()), (INDEX, &index(&map))]);
    let missing = refused(serde_json::json!({ "w": "one.safetensors", "v": "two.safetensors" }));
    assert!(
        missing.contains(INDEX) && missing.contains("`two.safetensors` is not in this folder"),
        "{missing}"
    );
    for wrong in [serde_json::json!(1), serde_json::json!(null), serde_json::json!(["one.safetensors"])] {
        let reason = refused(serde_json::json!({ "v": wrong }));
        let expected = format!("tensor `v`: expected the name of a file in `weight_map`, found {wrong}");
        assert!(reason.contains(&expected), "{reason}");
    }
    for (text, expected) in [
        ("", "EOF while parsing a value at line 1 column 0; download it again"),
        ("[]", ""),
        ("{}", "missing field `weight_map`"),
        (r#"{"weight_map":[]}"#, "invalid type"),
        (r#"{"weight_map": {"v""#, "EOF"),
    ] {
        let reason = refusal(&[(INDEX, text.as_bytes())]);
        assert!(reason.contains(&format!("no index of weights: {expected}")), "{text}: {reason}");
    }
    let folder = folder(&[(INDEX, &index(&serde_json::json!({ "v": "one.safetensors" })))]);
    fs::create_dir(folder.path().join("one.safetensors")).unwrap();
    let reason = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(reason.contains("one.safetensors: this is a folder"), "{reason}");
    assert!(refusal(&[]).contains("neither model.safetensors nor"));
}

#[test]
fn a_tensor_that_stands_twice_must_be_the_same() {
    let both = index(&serde_json::json!({ "v": "one.safetensors", "x": "two.safetensors" }));
    let with = |second: &[u8]| {
        let files = [("one.safetensors", &one([1, 2])[..]), ("two.safetensors", second), (INDEX, &both)];
        Checkpoint::open(folder(&files).path())
    };
    assert_eq!(with(&one([1, 2])).unwrap().names().collect::<Vec<_>>(), ["v"]);
    let shape = with_header(r#"{"v":{"dtype":"F16","shape":[1,1],"data_offsets":[0,2]}}"#, &[1, 2]);
    let dtype = with_header(r#"{"v":{"dtype":"BF16","shape":[1],"data_offsets":[0,2]}}"#, &[1, 2]);
    for second in [one([1, 3]), shape, dtype] {
        let reason = with(&second).unwrap_err().to_string();
        let expected = "two.safetensors: tensor `v`: one.safetensors has it too, as `v`, and the two differ";
        assert!(reason.contains(expected), "{reason}");
    }
    let folder = folder(&[(SINGLE, &file())]);
    let mut checkpoint = Checkpoint::open(folder.path()).unwrap();
    let reason = checkpoint.rename("b", "w").unwrap_err().to_string();
    assert!(reason.contains("tensor `b`: model.safetensors has it too, as `w`"), "{reason}");
}

#[test]
fn a_renamed_tensor_is_found_by_its_new_name_and_told_by_that_in_the_file() {
    let folder = folder(&[(SINGLE, &file())]);
    let mut checkpoint = Checkpoint::open(folder.path()).unwrap();
    checkpoint.rename("w", "model.w").unwrap();
    checkpoint.rename("absent", "model.absent").unwrap();
    assert!(checkpoint.contains("model.w") && !checkpoint.contains("w"));
    let reason = checkpoint.check("model.w", &[6, 4]).unwrap_err().to_string();
    assert!(reason.contains("tensor `w`: expected shape [6, 4]"), "{reason}");
}

#[test]
fn a_further_prefix_is_named_with_the_command_that_removes_it() {
    let with = |stored: &str, name: &str| {
        let header = serde_json::json!({ stored: { "dtype": "F16", "shape": [1], "data_offsets": [0, 2] } });
        let folder = folder(&[(SINGLE, &with_header(&header.to_string(), &[0, 0]))]);
        Checkpoint::open(folder.path()).unwrap().check(name, &[1]).unwrap_err().to_string()
    };
    for (stored, prefix) in [
        ("module.model.norm.weight", "module."),
        ("base_model.model.model.norm.weight", "base_model.model."),
        ("text-tower.norm.weight", "text-tower."),
    ] {
        let reason = with(stored, "model.norm.weight");
        let parts = [stored, &format!("k.removeprefix(\"{prefix}\")"), "python3 -c 'import glob"];
        assert!(parts.iter().all(|part| reason.contains(part)), "{reason}");
    }
    // Text of a file becomes no part of a command that could do something else.
    let reason = with("\"); evil('.norm.weight", "model.norm.weight");
    assert!(reason.ends_with("remove the prefix"), "{reason}");
    for stored in ["model.layers.0.norm.weight", "model.q_norm.weight", "norm.weight.x"] {
        assert!(with(stored, "model.norm.weight").contains("none of the weight files"), "{stored}");
    }
}

#[test]
fn weights_in_other_formats_are_named_with_what_makes_safetensors_of_them() {
    let to_safetensors = "AutoModelForCausalLM.from_pretrained(d, dtype=\"auto\").save_pretrained(d)' ";
    for (files, words) in [
        (&["pytorch_model.bin"][..], ["`pytorch_model.bin` has weights as pickles", to_safetensors]),
        (
            &["pytorch_model.bin.index.json", "pytorch_model-00001-of-00001.bin", "x.gguf"],
            ["`pytorch_model.bin.index.json`", to_safetensors],
        ),
        (&["a-q8.gguf", "b.gguf"], ["`a-q8.gguf` is a GGUF file", "a-q8.gguf`"]),
        (&["a b's.gguf"], ["gguf_file=f", r"'a b'\''s.gguf'`"]),
        (&["consolidated.safetensors"], ["`consolidated.safetensors` is in Meta's or Mistral's", "download"]),
        (&["consolidated.00.pth", "params.json"], ["`consolidated.00.pth`", "Hugging Face format"]),
        (&["weights.safetensors", "x.onnx"], ["`mv /", "/model.safetensors`"]),
        (
            &["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
            [
                "`model-00001-of-00002.safetensors` and others have no model.safetensors.index.json",
                "download it",
            ],
        ),
        (&["adapter_model.safetensors"], ["is an adapter without its adapter_config.json", "or the model"]),
        (&["tf_model.h5"], ["`tf_model.h5` is in a format that is not read", "as safetensors"]),
        (&["README.md"], ["neither model.safetensors nor", "name the folder of a model"]),
    ] {
        let files: Vec<(&str, &[u8])> = files.iter().map(|name| (*name, &b"x"[..])).collect();
        let reason = refusal(&files);
        assert!(words.iter().all(|word| reason.contains(word)), "{files:?}: {reason}");
    }
}

#[test]
fn an_adapter_is_refused_with_and_without_a_model_next_to_it() {
    let config = br#"{"base_model_name_or_path": "acme/base", "peft_type": "LORA"}"#;
    for more in [&[][..], &[(SINGLE, &file()[..])], &[("tokenizer.json", b"{}")]] {
        let reason = refusal(&[&[("adapter_config.json", &config[..])], more].concat());
        for word in ["adapter_config.json: this is an adapter of `acme/base`", "merge_and_unload", " merged`"]
        {
            assert!(reason.contains(word), "{reason}");
        }
        let tokenizer = if reason.contains("AutoTokenizer.from_pretrained(d)") { "d" } else { "base" };
        assert_eq!(tokenizer == "d", more.iter().any(|(name, _)| *name == "tokenizer.json"), "{reason}");
    }
    assert!(refusal(&[("adapter_config.json", b"[")]).contains("this is an adapter of a model"));
}

#[test]
fn a_slice_that_does_not_fit_its_target_is_an_error_of_the_rank_that_asks_for_it() {
    let folder = folder(&[(SINGLE, &file())]);
    let errors = on_loopback(2, |group| {
        let is_root = group.rank() == Rank(0);
        let checkpoint = is_root.then(|| Checkpoint::open(folder.path()).unwrap());
        let mut source = RootSource::new(checkpoint.as_ref(), Rank(0), group);
        let mut target = Tensor::zeros(&[2, 6], DType::F32).unwrap();
        let rows = if is_root { 0..2 } else { 0..4 };
        let filled = source.fill(&slice("w", &[4, 6], rows, 0..6), &mut target, 0);
        source.finish(filled).unwrap_err()
    });
    assert!(matches!(errors[0], Error::Peer { rank: Rank(1), .. }), "{}", errors[0]);
    assert!(matches!(errors[1], Error::Input(_)), "{}", errors[1]);
}

#[test]
fn a_link_to_weights_that_are_gone_is_named() {
    let folder = folder(&[]);
    std::os::unix::fs::symlink("../../blobs/0", folder.path().join(SINGLE)).unwrap();
    let reason = Checkpoint::open(folder.path()).unwrap_err().to_string();
    assert!(reason.contains("model.safetensors: this is a link to ../../blobs/0"), "{reason}");
}

#[test]
fn a_pointer_that_git_left_in_place_of_the_weights_is_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n";
    let reason = refusal(&[(SINGLE, pointer.as_bytes())]);
    assert!(reason.contains("Git LFS pointer") && reason.contains("git lfs pull"), "{reason}");
}

#[test]
fn damaged_files_are_refused_with_the_reason() {
    let (file, header) = (file(), |json: &str, data: usize| with_header(json, &vec![0; data]));
    for (bytes, expected) in [
        (vec![], "the file is empty; download it again"),
        (vec![0; 4], "4 bytes are no safetensors file"),
        (vec![0; 8], "the header is not valid: EOF"),
        (vec![0; 4096], "the header is not valid: EOF"),
        (
            vec![0xff; 64],
            "claim a header of 18446744073709551615 bytes, and no safetensors file has so long a header",
        ),
        (b"<!DOCTYPE html><html></html>".to_vec(), "download the file again, or convert it"),
        (b"PK\x03\x04\0\0\0\0\0\0archive/data.pkl".to_vec(), "the file ends before: it is truncated"),
        (file[..40].to_vec(), "the file ends before: it is truncated; download it again"),
        (file[..file.len() - 1].to_vec(), "it is truncated; download it again"),
        ([&file[..], &[0]].concat(), "1 bytes at the end belong to no tensor"),
        (header("[]", 0), "the header is not valid: invalid type: sequence"),
        (header("null", 0), "the header is not valid"),
        (header("{", 0), "the header is not valid: EOF"),
        (header("{}x", 0), "the header is not valid: trailing characters"),
        (header("{}", 4), "4 bytes at the end belong to no tensor"),
    ] {
        let reason = refusal(&[(SINGLE, &bytes)]);
        assert!(reason.contains("model.safetensors: ") && reason.contains(expected), "{expected}: {reason}");
    }

    let far = format!(r#""dtype":"F32","shape":[1],"data_offsets":[{0},{0}]"#, u64::MAX);
    for (entry, data, expected) in [
        ("", 0, "the header entry is not valid: missing field"),
        (r#""dtype":"F32","shape":[1]"#, 4, "missing field `data_offsets`"),
        (r#""dtype":32,"shape":[1],"data_offsets":[0,4]"#, 4, "invalid type"),
        (r#""dtype":"F32","shape":4,"data_offsets":[0,4]"#, 4, "invalid type"),
        (r#""dtype":"F32","shape":[-1],"data_offsets":[0,4]"#, 4, "invalid value"),
        (r#""dtype":"F32","shape":[1.5],"data_offsets":[0,4]"#, 4, "invalid type"),
        (r#""dtype":"F32","shape":[1],"data_offsets":[0]"#, 4, "invalid length"),
        (r#""dtype":"F32","shape":[1],"data_offsets":[4,0]"#, 4, "before they start"),
        (r#""dtype":"F32","shape":[1],"data_offsets":[4,8]"#, 8, "should start at"),
        (r#""dtype":"F32","shape":[1],"data_offsets":[0,8]"#, 4, "it is truncated"),
        (r#""dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]"#, 4, "it is truncated"),
        (&far, 0, "it is truncated"),
        (r#""dtype":"F32","shape":[2],"data_offsets":[0,4]"#, 4, "does not fill its 4 bytes"),
        (r#""dtype":"F64","shape":[1],"data_offsets":[0,4]"#, 4, "does not fill its 4 bytes"),
        (r#""dtype":"F32","shape":[18446744073709551615,2],"data_offsets":[0,4]"#, 4, "does not fill"),
        (r#""dtype":"F32","shape":[4611686018427387905],"data_offsets":[0,4]"#, 4, "does not fill"),
        (r#""dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]"#, 0, "does not fill"),
    ] {
        let reason = refusal(&[(SINGLE, &header(&format!(r#"{{"x":{{{entry}}}}}"#), data))]);
        assert!(reason.contains("tensor `x`: ") && reason.contains(expected), "{entry}: {reason}");
    }

    for (tensors, expected) in [
        ([("a", 0, 8), ("b", 4, 12)], "tensor `b`: its bytes start at"),
        ([("a", 0, 4), ("b", 8, 12)], "tensor `b`: its bytes start at"),
        ([("a", 0, 8), ("b", 0, 8)], "should start at"),
        ([("a", 0, 4), ("a", 0, 4)], "tensor `a`: the header has this name twice"),
    ] {
        let entries = tensors.map(|(name, from, to)| {
            format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{from},{to}]}}"#, to - from)
        });
        let reason = refusal(&[(SINGLE, &header(&format!("{{{}}}", entries.join(",")), tensors[1].2))]);
        assert!(reason.contains(expected) && reason.contains("corrupt: download"), "{reason}");
    }
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
                let _ = checkpoint.read_into(&slice(name, &[4, 6], 0..4, 0..6), &mut target, 0);
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

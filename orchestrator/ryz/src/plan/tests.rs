use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use ryzanstein_orchestrator::table::Screen;
use ryzanstein_tensor_parallel::legal_world_sizes;

/// A model as its `config.json` describes it, and its published figures.
struct Known {
    name: &'static str,
    config: Value,
    parameters: u64,
    legal: &'static [usize],
}

/// Returns public models: the shapes in their config.json, and the numbers of parameters that their authors or their
/// checkpoints give.
fn models() -> Vec<Known> {
    let llama = |[hidden, intermediate, heads, kv_heads, layers, vocabulary, positions]: [usize; 7],
                 dtype: &str| {
        json!({
            "architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "torch_dtype": dtype,
            "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "num_hidden_layers": layers, "vocab_size": vocabulary,
            "max_position_embeddings": positions, "rms_norm_eps": 1e-5, "tie_word_embeddings": false,
        })
    };
    let with = |mut config: Value, more: Value| {
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        config
    };
    let qwen2 = |shape, tied: bool| {
        let more = json!({
            "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6, "rms_norm_eps": 1e-6,
            "sliding_window": 131_072, "use_sliding_window": false, "tie_word_embeddings": tied,
        });
        with(llama(shape, "bfloat16"), more)
    };
    let qwen3 = json!({ "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "sliding_window": null });
    let rope_scaling = json!({ "rope_theta": 500_000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }});
    let known = |name, config, parameters, legal| Known { name, config, parameters, legal };
    vec![
        known(
            "Llama-2-7B",
            llama([4096, 11008, 32, 32, 32, 32000, 4096], "float16"),
            6_738_415_616,
            &[1, 2, 4, 8],
        ),
        known(
            "Llama-2-13B",
            llama([5120, 13824, 40, 40, 40, 32000, 4096], "float16"),
            13_015_864_320,
            &[1, 2, 4, 8],
        ),
        known(
            "Llama-2-70B",
            llama([8192, 28672, 64, 8, 80, 32000, 4096], "float16"),
            68_976_648_192,
            &[1, 2, 4, 8],
        ),
        known(
            "Llama-3-8B",
            llama([4096, 14336, 32, 8, 32, 128_256, 8192], "bfloat16"),
            8_030_261_248,
            &[1, 2, 4, 8],
        ),
        known(
            "Llama-3-70B",
            llama([8192, 28672, 64, 8, 80, 128_256, 8192], "bfloat16"),
            70_553_706_496,
            &[1, 2, 4, 8],
        ),
        known(
            "Llama-3.1-405B",
            with(llama([16384, 53248, 128, 8, 126, 128_256, 131_072], "bfloat16"), rope_scaling),
            405_853_388_800,
            &[1, 2, 4, 8],
        ),
        known(
            "Mistral-7B",
            with(
                llama([4096, 14336, 32, 8, 32, 32000, 32768], "bfloat16"),
                json!({ "architectures": ["MistralForCausalLM"], "sliding_window": 4096 }),
            ),
            7_241_732_096,
            &[1, 2, 4, 8],
        ),
        known(
            "Qwen2-7B",
            qwen2([3584, 18944, 28, 4, 28, 152_064, 131_072], false),
            7_615_616_512,
            &[1, 2, 4],
        ),
        known("Qwen2-0.5B", qwen2([896, 4864, 14, 2, 24, 151_936, 131_072], true), 494_032_768, &[1, 2]),
        known(
            "Qwen3-0.6B",
            with(qwen2([1024, 3072, 16, 8, 28, 151_936, 40_960], true), qwen3.clone()),
            596_049_920,
            &[1, 2, 4, 8],
        ),
        known(
            "Qwen3-8B",
            with(qwen2([4096, 12288, 32, 8, 36, 151_936, 40_960], false), qwen3),
            8_190_735_360,
            &[1, 2, 4, 8],
        ),
        known(
            "TinyLlama-1.1B",
            llama([2048, 5632, 32, 4, 22, 32000, 2048], "bfloat16"),
            1_100_048_384,
            &[1, 2, 4, 8],
        ),
    ]
}

fn parsed(config: &Value) -> Result<LlamaConfig, Error> {
    LlamaConfig::from_json(Path::new("config.json"), &config.to_string(), None)
}

fn model(name: &str) -> LlamaConfig {
    parsed(&models().into_iter().find(|known| known.name == name).unwrap().config).unwrap()
}

/// Returns a request for GPUs of 80 GiB that are joined by NVLink.
fn usual() -> Request {
    Request {
        model: "a model".into(),
        world_size: None,
        batch: 1,
        context: None,
        dtype: None,
        memory: Some(80 << 30),
        memory_fraction: 0.9,
        interconnect: Interconnect::NVLINK4,
        numerics: Numerics::Fast,
    }
}

fn legal(plan: &Plan) -> impl Iterator<Item = &Size> {
    plan.sizes.iter().filter(|size| size.legal)
}

#[test]
fn known_models_have_their_parameters_and_legal_world_sizes() {
    for Known { name, config, parameters, legal: expected } in models() {
        let plan = plan(&parsed(&config).unwrap(), &usual()).unwrap();
        assert_eq!(plan.parameters, parameters, "{name}");
        assert_eq!(legal(&plan).map(|size| size.world_size).collect::<Vec<_>>(), expected, "{name}");
        assert_eq!(
            plan.sizes.iter().map(|size| size.world_size).collect::<Vec<_>>(),
            (1..=8).collect::<Vec<_>>()
        );
        for size in legal(&plan) {
            // Matrices are stored in 2 bytes. Vectors are held in f32; padding and copies of key/value heads are additional.
            let weights = size.weights_bytes.unwrap() * size.world_size as u64;
            let least = 2 * parameters;
            assert!(
                (least..least + least / 12).contains(&weights),
                "{name} on {}: {weights}",
                size.world_size
            );
        }
    }
}

#[test]
fn invariant_numerics_have_the_legal_world_sizes_of_a_job() {
    let config = model("Llama-3-8B");
    let request = Request { world_size: Some(16), numerics: Numerics::Invariant, ..usual() };
    let sizes: Vec<_> = legal(&plan(&config, &request).unwrap()).map(|size| size.world_size).collect();
    assert_eq!(sizes, legal_world_sizes(&config, 16, Numerics::Invariant));
    assert_eq!(sizes, [1, 2, 4, 8]);
}

#[test]
fn models_of_other_architectures_are_refused_by_name() {
    for name in [
        "MixtralForCausalLM",
        "Gemma2ForCausalLM",
        "GPT2LMHeadModel",
        "Phi3ForCausalLM",
        "DeepseekV3ForCausalLM",
    ] {
        let mut config = models()[0].config.clone();
        config["architectures"] = json!([name]);
        let error = parsed(&config).unwrap_err().to_string();
        assert!(error.contains(&format!("architecture `{name}` is not supported")), "{error}");
    }
    let mut quantized = models()[3].config.clone();
    quantized["quantization_config"] = json!({ "quant_method": "awq" });
    assert!(parsed(&quantized).unwrap_err().to_string().contains("quantized weights are not supported"));
}

#[test]
fn an_8b_llama_takes_the_memory_that_its_shapes_add_up_to() {
    let plan = plan(&model("Llama-3-8B"), &usual()).unwrap();
    let [one, two] = [0, 1].map(|index| &plan.sizes[index]);
    // Two bytes a parameter, and two more for those of the 65 norms, which are f32.
    assert_eq!(one.weights_bytes, Some(2 * 8_030_261_248 + 2 * 65 * 4096));
    // Keys and values of 32 layers, 8 heads, 8192 positions, 128 elements of 2 bytes.
    assert_eq!(one.kv_cache_bytes, Some(2 * 32 * 8 * 8192 * 128 * 2));
    assert_eq!(two.kv_cache_bytes, one.kv_cache_bytes.map(|bytes| bytes / 2));
    assert_eq!((one.fits, one.max_context), (Some(true), Some(8192)));
    // One all-reduce for the embedding and two a layer, each of 4096 elements.
    assert_eq!(
        (one.all_reduce_bytes_per_token, two.all_reduce_bytes_per_token),
        (Some(0), Some(65 * 4096 * 2))
    );
    assert_eq!((one.communication_share, one.nccl_bytes, one.shared_bytes), (Some(0.0), Some(0), Some(0)));
    assert_eq!(two.shared_bytes, Some(136 << 20));
    // 65 calls of 6.6 µs with 2 steps of 0.6 µs, and 8 KiB once through the link; and the logits; against 8 GB of weights, KV
    // cache included, at 3.35 TB/s.
    let share = two.communication_share.unwrap();
    assert!((0.15..0.18).contains(&share), "{share}");
}

#[test]
fn a_70b_llama_needs_two_large_gpus_and_its_longest_context_is_the_longest_that_fits() {
    let config = model("Llama-3-70B");
    let whole = plan(&config, &usual()).unwrap();
    assert_eq!(
        [0, 1, 3, 7].map(|index| whole.sizes[index].fits),
        [Some(false), Some(true), Some(true), Some(true)]
    );
    assert_eq!(whole.sizes[0].max_context, Some(0));
    let scarce = Request { memory: Some(83_000_000_000), batch: 4, ..usual() };
    let longest = plan(&config, &scarce).unwrap().sizes[1].max_context.unwrap();
    assert!((1..8192).contains(&longest), "{longest}");
    let fits = |context| {
        let request = Request { context: Some(context), ..scarce.clone() };
        plan(&config, &request).unwrap().sizes[1].fits
    };
    assert_eq!((fits(longest), fits(longest + 1)), (Some(true), Some(false)));
}

#[test]
fn what_fits_is_not_said_where_the_memory_is_not_known() {
    let plan = plan(&model("Llama-3-8B"), &Request { memory: None, ..usual() }).unwrap();
    assert!(legal(&plan).all(|size| size.fits.is_none() && size.max_context.is_none()));
    assert!(plan.table(Screen::PLAIN).contains("pass --memory SIZE"));
}

#[test]
fn key_value_heads_are_copied_where_there_are_fewer_than_ranks() {
    let config = model("TinyLlama-1.1B");
    let plan = plan(&config, &Request { world_size: Some(16), ..usual() }).unwrap();
    let copies: Vec<_> = legal(&plan).map(|size| (size.world_size, size.kv_replication.unwrap())).collect();
    assert_eq!(copies, [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)]);
    // One head on each rank, whatever the number of ranks.
    assert_eq!(plan.sizes[3].kv_cache_bytes, plan.sizes[7].kv_cache_bytes);
}

#[test]
fn a_context_beyond_the_model_and_weights_of_an_unknown_type_are_refused_with_what_to_pass() {
    let config = model("Llama-2-7B");
    let error = plan(&config, &Request { context: Some(4097), ..usual() }).unwrap_err().to_string();
    assert!(error.contains("ask for at most --context 4096"), "{error}");
    let untold = LlamaConfig { stored_dtype: None, ..config };
    let error = plan(&untold, &usual()).unwrap_err().to_string();
    assert!(error.contains("pass --dtype f32, f16 or bf16"), "{error}");
    let told = plan(&untold, &Request { dtype: Some(DType::F32), ..usual() }).unwrap();
    assert_eq!(told.sizes[0].weights_bytes, Some(4 * 6_738_415_616));
}

#[test]
fn the_json_has_its_keys_in_order_and_nothing_for_sizes_that_are_not_legal() {
    let text = crate::command::json(&plan(&model("Qwen2-7B"), &usual()).unwrap());
    assert!(text.starts_with(
        r#"{"model":"a model","sizes":[{"world_size":1,"legal":true,"why":null,"weights_bytes":"#
    ));
    let keys = [
        "weights_bytes",
        "kv_cache_bytes",
        "workspace_bytes",
        "total_bytes",
        "fits",
        "all_reduce_bytes_per_token",
    ];
    let at = |key: &str| text.find(&format!("\"{key}\":")).unwrap();
    assert!(keys.windows(2).all(|pair| at(pair[0]) < at(pair[1])) && !text.contains('\n'));
    let json: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        (&json["dtype"], &json["interconnect"], &json["context"]),
        (&json!("bf16"), &json!("nvlink4"), &json!(131_072))
    );
    let seven = &json["sizes"][6];
    assert_eq!(
        (&seven["legal"], &seven["total_bytes"], &seven["fits"]),
        (&json!(false), &Value::Null, &Value::Null)
    );
    assert_eq!(
        seven["why"],
        "world size 7 is not a multiple of 4 key/value heads, so they cannot be replicated evenly"
    );
}

#[test]
fn the_table_fits_a_terminal_and_says_why_sizes_are_not_legal() {
    let config = model("Llama-3.1-405B");
    let plan = plan(&config, &Request { model: "models/llama-405b".into(), ..usual() }).unwrap();
    let wide = plan.table(Screen::PLAIN);
    for wanted in [
        "models/llama-405b: 405.85 billion",
        "KV copies",
        "illegal",
        "3 ranks: world size 3 does not divide 128",
    ] {
        assert!(wide.contains(wanted), "`{wanted}` is not in\n{wide}");
    }
    let narrow = plan.table(Screen { width: Some(80), color: false });
    assert!(narrow.lines().all(|line| line.chars().count() <= 80), "{narrow}");
    for wanted in ["ranks", "weights", "KV cache", "workspace", "total", "comm.", "longest"] {
        assert!(narrow.contains(wanted), "`{wanted}` is not in\n{narrow}");
    }
}

proptest! {
    #[test]
    fn more_ranks_need_less_of_each_and_communicate_more(
        index in 0usize..10, batch in 1usize..64, context in 1usize..2048,
        interconnect in proptest::sample::select(Interconnect::ALL.to_vec()),
    ) {
        let config = parsed(&models()[index].config).unwrap();
        let request = Request { batch, context: Some(context), memory: None, interconnect, ..usual() };
        let plan = plan(&config, &request).unwrap();
        let sizes: Vec<&Size> = legal(&plan).collect();
        for pair in sizes.windows(2) {
            prop_assert!(pair[1].weights_bytes < pair[0].weights_bytes);
            prop_assert!(pair[1].kv_cache_bytes <= pair[0].kv_cache_bytes);
            prop_assert!(pair[1].communication_share > pair[0].communication_share);
        }
        for size in sizes {
            let parts = [size.weights_bytes, size.kv_cache_bytes, size.workspace_bytes, size.nccl_bytes, size.shared_bytes];
            prop_assert_eq!(size.total_bytes, Some(parts.iter().flatten().sum()));
            prop_assert!(size.communication_share < Some(1.0));
        }
    }
}

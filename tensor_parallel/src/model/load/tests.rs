use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager};

use super::*;
use crate::attention::CacheSize;
use crate::checkpoint::MemorySource;
use crate::compute::{AttentionCall, Batch, Host, LayerCache, SlotMapping};
use crate::model::{Passes, TensorSpec, footprint};
use crate::rotary::Rotary;
use crate::tensor::Tensor;
use crate::testing::{fixture, on_loopback};

/// A host with memory for a limited number of long-lived arrays, as a GPU may have.
#[derive(Debug)]
struct Scant {
    host: Host,
    left: AtomicUsize,
    /// Bytes of the arrays allocated so far.
    taken: Arc<AtomicUsize>,
}

impl Scant {
    fn new(arrays: usize) -> Self {
        Self { host: Host::new(1), left: AtomicUsize::new(arrays), taken: Arc::default() }
    }
}

impl Compute for Scant {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map_err(|_| Error::input("no memory is left"))?;
        let array = self.host.zeros(shape, dtype)?;
        self.taken.fetch_add(array.bytes(), Ordering::Relaxed);
        Ok(array)
    }

    fn scratch(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.host.scratch(shape, dtype)
    }

    fn weight_dtype(&self, stored: DType, activations: DType) -> DType {
        self.host.weight_dtype(stored, activations)
    }

    fn batch(&self, tokens: &[u32], slots: &SlotMapping, rotary: &Rotary) -> Result<Batch> {
        self.host.batch(tokens, slots, rotary)
    }

    fn linear(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, out: DType) -> Result<Tensor> {
        self.host.linear(x, weight, bias, out)
    }

    fn embed(&self, table: &Tensor, first: usize, batch: &Batch, out: DType) -> Result<Tensor> {
        self.host.embed(table, first, batch, out)
    }

    fn rms_norm(&self, x: &Tensor, weight: &Tensor, epsilon: f32) -> Result<Tensor> {
        self.host.rms_norm(x, weight, epsilon)
    }

    fn add(&self, x: &mut Tensor, y: &Tensor) -> Result<()> {
        self.host.add(x, y)
    }

    fn swiglu(&self, x: &Tensor) -> Result<Tensor> {
        self.host.swiglu(x)
    }

    fn attention(&self, qkv: Tensor, call: &AttentionCall<'_>, cache: &mut LayerCache) -> Result<Tensor> {
        self.host.attention(qkv, call, cache)
    }

    fn select_columns(&self, blocks: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        self.host.select_columns(blocks, columns)
    }
}

/// Loads on four ranks from rank 0, with the `compute` of rank `broken` failing. Returns the result of each rank.
fn load(broken: usize, compute: impl Fn() -> Result<Box<dyn Compute>> + Sync) -> Vec<Error> {
    let folder = fixture("llama-mha");
    let mut config = Config::default();
    config.process_group.backend = BackendChoice::Tcp;
    // A rank that waits for a failed one waits this long.
    config.process_group.timeout = Timeout::from_secs(30);
    let rank_main = |rendezvous| {
        let mut manager = ProcessGroupManager::initialize(&config, &rendezvous).unwrap();
        let group = manager.world();
        let is_broken = group.rank().index() == broken;
        let compute =
            |_: &ProcessGroup, _| if is_broken { compute() } else { Ok(Box::new(Host::new(1)) as _) };
        let error = Llama::load_from_root_on(Some(&folder), None, Rank(0), group, compute).unwrap_err();
        // Not before the others have received the error, or they would report a lost rank instead.
        manager.store_barrier("heard", Duration::from_secs(60)).unwrap();
        error
    };
    std::thread::scope(|scope| {
        let ranks = MemoryRendezvous::new(4).into_iter().map(|r| scope.spawn(|| rank_main(r)));
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

fn all_hear(errors: &[Error], broken: usize, reason: &str) {
    for (rank, error) in errors.iter().enumerate() {
        let own = matches!(error, Error::Input(_));
        let told = matches!(error, Error::Peer { rank, .. } if rank.index() == broken);
        assert!(if rank == broken { own } else { told }, "rank {broken} fails, rank {rank} hears: {error}");
        assert!(error.to_string().contains(reason), "rank {broken} fails, rank {rank} hears: {error}");
    }
}

#[test]
fn a_rank_that_cannot_compute_tells_all_before_weights_are_sent() {
    for broken in [0, 2] {
        let errors = load(broken, || Err(Error::input("there is no GPU")));
        all_hear(&errors, broken, "there is no GPU");
    }
}

#[test]
fn a_rank_that_fails_while_weights_are_sent_leaves_nobody_waiting() {
    for broken in [0, 2] {
        // Before the first tensor, in the middle, and at the last of embedding, two layers of six, norm and head.
        for room in [0, 5, 14] {
            let errors = load(broken, || Ok(Box::new(Scant::new(room))));
            all_hear(&errors, broken, "no memory is left");
        }
    }
}

#[test]
fn a_rank_with_just_enough_memory_loads_and_computes_as_the_others_do() {
    let folder = fixture("llama-mha");
    let mut groups = ProcessGroup::loopback(1);
    let group = &mut groups[0];
    let mut logits = |compute: Box<dyn Compute>| {
        let model =
            Llama::load_from_root_on(Some(&folder), None, Rank(0), group, |_, _| Ok(compute)).unwrap();
        let mut decoder = Arc::new(model).decoder(CacheSize::full(1, 3), Passes::Eager).unwrap();
        decoder.logits(0, &[1, 2, 3], group).unwrap().values().unwrap().into_owned()
    };
    // Fifteen weights, and keys and values of two layers.
    let scant = logits(Box::new(Scant::new(15 + 4)));
    assert_eq!(scant, logits(Box::new(Host::new(1))));
}

#[test]
fn ranks_with_different_arithmetic_all_fail_and_name_both() {
    let compare = |sets: [&str; 2]| {
        on_loopback(2, |group| compare_arithmetic(sets[group.rank().index()].into(), group))
    };
    let sets = ["fast numerics and avx2", "invariant numerics and avx2"];
    for (outcome, [mine, theirs]) in compare(sets).into_iter().zip([[0, 1], [1, 0]]) {
        let want = ConfigurationError::DifferentArithmetic {
            rank: Rank(theirs as u32),
            theirs: sets[theirs].to_string(),
            other: Rank(mine as u32),
            mine: sets[mine].to_string(),
        };
        assert!(matches!(&outcome, Err(Error::Configuration(error)) if *error == want), "{outcome:?}");
    }
    assert!(compare([sets[0]; 2]).iter().all(Result::is_ok));
}

/// Loads one rank's shard of random weights and creates a decoder. Returns the bytes of the arrays that loading and the cache
/// allocated.
fn really_taken(config: &LlamaConfig, rank: usize, world_size: usize, dtype: DType) -> (usize, usize) {
    let made_up = |spec: &TensorSpec| {
        let count = spec.shape.iter().product::<usize>();
        let values = (0..count).map(|i| (i % 13) as f32 / 13.0).collect();
        (spec.name.clone(), Tensor::new(&spec.shape, values, dtype).unwrap())
    };
    let whole: HashMap<String, Tensor> = tensors(config).unwrap().iter().map(made_up).collect();
    let mut source = MemorySource { tensors: &whole };
    let compute = Scant::new(usize::MAX);
    let taken = Arc::clone(&compute.taken);
    let mut loader = Loader::new(&mut source, rank, world_size, dtype).unwrap();
    let model = Llama::from_loader(config.clone(), dtype, Box::new(compute), &mut loader).unwrap();
    let weights = taken.load(Ordering::Relaxed);
    let _decoder = Arc::new(model).decoder(CacheSize::full(3, 20), Passes::Eager).unwrap();
    (weights, taken.load(Ordering::Relaxed) - weights)
}

#[test]
fn the_footprint_is_what_loading_and_the_cache_really_take() {
    // Biases, a vocabulary that is not divisible, and one key/value head for two ranks; heads of another length, tied; and norms
    // of heads.
    let configs = [
        r#"{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8,
            "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 101}"#,
        r#"{"model_type": "llama", "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4, "head_dim": 16,
            "num_hidden_layers": 3, "vocab_size": 200, "attention_bias": true, "mlp_bias": true, "tie_word_embeddings": true}"#,
        r#"{"model_type": "qwen3", "hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
            "num_hidden_layers": 2, "vocab_size": 200, "rope_scaling": {"type": "dynamic", "factor": 2}}"#,
    ];
    for config in configs {
        let config = LlamaConfig::from_json(Path::new("config.json"), config, None).unwrap();
        for (world_size, dtype) in [(1, DType::F32), (1, DType::BF16), (2, DType::F32), (2, DType::F16)] {
            let plan = footprint(&config, world_size, dtype, 3, 20).unwrap();
            for rank in 0..world_size {
                let real = really_taken(&config, rank, world_size, dtype);
                let planned = (plan.weights as usize, plan.kv_cache as usize);
                assert_eq!(real, planned, "rank {rank} of {world_size}, {dtype}: {config:?}");
            }
            assert!(plan.workspace > 32 << 20 && plan.read_per_step <= plan.weights + plan.kv_cache);
        }
    }
}

#[test]
fn a_footprint_is_refused_where_loading_or_the_cache_would_be() {
    let folder = fixture("llama-mha");
    let config = LlamaConfig::from_folder(&folder).unwrap();
    let error = footprint(&config, 3, DType::F32, 1, 1).unwrap_err().to_string();
    assert!(error.contains("world size 3 does not divide 8 attention heads; legal sizes"), "{error}");
    let error = footprint(&config, 2, DType::F32, 1, 257).unwrap_err().to_string();
    assert!(error.contains("257 positions are more than the 256"), "{error}");
    assert!(footprint(&config, 2, DType::F32, usize::MAX, 256).is_err());
    assert!(footprint(&config, 2, DType::I8, 1, 1).is_err());
}

#[test]
fn windows_and_untied_embeddings_are_not_read_in_every_step() {
    let with = |more: &str, positions: usize| {
        let config = format!(
            r#"{{"model_type": "mistral", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
                "num_key_value_heads": 4, "num_hidden_layers": 2, "vocab_size": 128, {more}}}"#
        );
        let config = LlamaConfig::from_json(Path::new("config.json"), &config, None).unwrap();
        footprint(&config, 2, DType::BF16, 1, positions).unwrap()
    };
    let whole = with(r#""sliding_window": null, "tie_word_embeddings": true"#, 1024);
    assert_eq!(whole.read_per_step, whole.weights + whole.kv_cache);
    // The cache has whole pages.
    let shorter = with(r#""sliding_window": null, "tie_word_embeddings": true"#, 960);
    assert_eq!(shorter.kv_cache, whole.kv_cache);
    assert_eq!(shorter.read_per_step, shorter.weights + shorter.kv_cache / 16 * 15);
    let window = with(r#""sliding_window": 256, "tie_word_embeddings": true"#, 1024);
    assert_eq!(window.read_per_step, window.weights + window.kv_cache / 4);
    let untied = with(r#""sliding_window": null"#, 1024);
    assert_eq!(untied.read_per_step, whole.read_per_step);
    assert_eq!(untied.weights - whole.weights, 64 * 64 * 2);
}

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager};

use super::*;
use crate::compute::{AttentionCall, Batch, Host, LayerCache, SlotMapping};
use crate::rotary::Rotary;
use crate::tensor::Tensor;

/// A host with memory for so many arrays that stay, and no more, as a GPU may have.
#[derive(Debug)]
struct Scant {
    host: Host,
    left: AtomicUsize,
}

impl Scant {
    fn new(arrays: usize) -> Self {
        Self { host: Host::new(1), left: AtomicUsize::new(arrays) }
    }
}

impl Compute for Scant {
    fn zeros(&self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let left = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map_err(|_| Error::input("no memory is left"))?;
        self.host.zeros(shape, dtype)
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

    fn update_batch(
        &self,
        batch: &mut Batch,
        tokens: &[u32],
        slots: &SlotMapping,
        rotary: &Rotary,
    ) -> Result<()> {
        self.host.update_batch(batch, tokens, slots, rotary)
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

    fn slice_columns(&self, x: &Tensor, columns: Range<usize>) -> Result<Tensor> {
        self.host.slice_columns(x, columns)
    }

    fn concat_columns(&self, blocks: Tensor, keep: usize) -> Result<Tensor> {
        self.host.concat_columns(blocks, keep)
    }
}

/// Four ranks load from rank 0, and what `compute` gives rank `broken` fails there; what each of them hears.
fn load(
    backend: BackendChoice,
    broken: usize,
    compute: impl Fn() -> Result<Box<dyn Compute>> + Sync,
) -> Vec<Error> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-mha");
    let mut config = Config::default();
    config.process_group.backend = backend;
    // Whoever waits for a rank that has given up waits this long.
    config.process_group.timeout = Timeout::from_secs(30);
    let rank_main = |rendezvous| {
        let mut manager = ProcessGroupManager::initialize(&config, &rendezvous).unwrap();
        let group = manager.world();
        let is_broken = group.rank().index() == broken;
        let compute = |_: &ProcessGroup| if is_broken { compute() } else { Ok(Box::new(Host::new(1)) as _) };
        let error = Llama::load_from_root_on(Some(&folder), None, Rank(0), group, compute).unwrap_err();
        // Not before the others have heard, or they would hear of a lost rank instead.
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

const BOTH: [BackendChoice; 2] = [BackendChoice::Loopback, BackendChoice::Tcp];

#[test]
fn a_rank_that_cannot_compute_tells_all_before_weights_are_sent() {
    for (backend, broken) in BOTH.into_iter().flat_map(|backend| [(backend, 0), (backend, 2)]) {
        let errors = load(backend, broken, || Err(Error::input("there is no GPU")));
        all_hear(&errors, broken, "there is no GPU");
    }
}

#[test]
fn a_rank_that_fails_while_weights_are_sent_leaves_nobody_waiting() {
    for (backend, broken) in BOTH.into_iter().flat_map(|backend| [(backend, 0), (backend, 2)]) {
        // Before the first tensor, in the middle, and at the last of embedding, two layers of six, norm and head.
        for room in [0, 5, 14] {
            let errors = load(backend, broken, || Ok(Box::new(Scant::new(room))));
            all_hear(&errors, broken, "no memory is left");
        }
    }
}

#[test]
fn a_rank_with_just_enough_memory_loads_and_computes_as_the_others_do() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/llama-mha");
    let mut groups = ProcessGroup::loopback(1);
    let group = &mut groups[0];
    let mut logits = |compute: Box<dyn Compute>| {
        let model = Llama::load_from_root_on(Some(&folder), None, Rank(0), group, |_| Ok(compute)).unwrap();
        let mut cache = model.cache(3).unwrap();
        model.forward(&[1, 2, 3], &mut cache, group).unwrap().values().unwrap().into_owned()
    };
    // Fifteen weights, and keys and values of two layers.
    let scant = logits(Box::new(Scant::new(15 + 4)));
    assert_eq!(scant, logits(Box::new(Host::new(1))));
}

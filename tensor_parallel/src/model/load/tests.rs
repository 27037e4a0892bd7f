use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use ryzanstein_config::{BackendChoice, Config, Timeout};
use ryzanstein_process_group::{MemoryRendezvous, ProcessGroupManager};

use super::*;
use crate::attention::{LayerCache, Rotary};
use crate::compute::{AttentionCall, Host, Step};
use crate::tensor::Tensor;

/// Memory for so many arrays and no more, as a GPU may have. It is for loading only.
#[derive(Debug)]
struct Scant(AtomicUsize);

#[rustfmt::skip]
impl Compute for Scant {
    fn zeros(&self, shape: &[usize], dtype: Dtype) -> Result<Tensor> {
        let left = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
        left.map_err(|_| Error::input("no memory is left"))?;
        Ok(Tensor::zeros(shape, dtype))
    }

    fn step(&self, _: &[u32], _: usize, _: &Rotary) -> Result<Step> { unimplemented!() }
    fn set_step(&self, _: &mut Step, _: &[u32], _: usize, _: &Rotary) -> Result<()> { unimplemented!() }
    fn linear(&self, _: &Tensor, _: &Tensor, _: Option<&Tensor>, _: Dtype) -> Result<Tensor> { unimplemented!() }
    fn embed(&self, _: &Tensor, _: usize, _: &Step, _: Dtype) -> Result<Tensor> { unimplemented!() }
    fn rms_norm(&self, _: &Tensor, _: &Tensor, _: f32) -> Result<Tensor> { unimplemented!() }
    fn add(&self, _: &mut Tensor, _: &Tensor) -> Result<()> { unimplemented!() }
    fn swiglu(&self, _: &Tensor) -> Result<Tensor> { unimplemented!() }
    fn attention(&self, _: Tensor, _: &AttentionCall<'_>, _: &mut LayerCache) -> Result<Tensor> { unimplemented!() }
    fn columns(&self, _: &Tensor, _: Range<usize>) -> Result<Tensor> { unimplemented!() }
    fn join(&self, _: Tensor, _: usize) -> Result<Tensor> { unimplemented!() }
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
            let errors = load(backend, broken, || Ok(Box::new(Scant(AtomicUsize::new(room)))));
            all_hear(&errors, broken, "no memory is left");
        }
    }
}

//! The GPU that a fault belongs to, the GPUs that count, and the advice on tensor parallelism.

use super::*;

#[test]
fn a_fault_of_one_gpu_is_laid_to_that_one() {
    let mut facts = h200();
    driver(&mut facts).gpus[2].mig = Some(true);
    let bad: Vec<_> = diagnose(&facts).into_iter().filter(|f| f.status == Status::Warning).collect();
    assert_eq!(bad.len(), 1);
    assert_eq!(bad[0].subject.as_deref(), Some("2"));
}

#[test]
fn the_advice_on_tensor_parallelism_follows_the_links() {
    let no = PeerAccess::No("the chipset does not support it".into());
    let rows = [
        (with_gpus(1, PairPath::Unknown, &PeerAccess::Yes), "up to 1"),
        (with_gpus(4, PairPath::Nvlink(18), &PeerAccess::Yes), "up to 4"),
        (with_gpus(8, PairPath::Nvlink(18), &PeerAccess::Yes), "up to 8"),
        // Heads are not divisible by three.
        (with_gpus(3, PairPath::Nvlink(4), &PeerAccess::Yes), "up to 2"),
        (with_gpus(4, PairPath::System, &PeerAccess::Yes), "up to 2"),
        (with_gpus(4, PairPath::System, &no), "1 is likely best"),
        (plain(), "on the CPU"),
    ];
    for (facts, wanted) in rows {
        let findings = diagnose(&facts);
        let advice = findings.iter().find(|f| f.name == "tensor_parallel").expect("advice");
        assert!(advice.seen.contains(wanted), "{}: not {wanted}", advice.seen);
    }
    // Two NVLink domains, joined by PCI.
    for (size, ranks) in [(2, 2), (3, 2), (16, 8)] {
        let mut islands = with_gpus(2 * size, PairPath::System, &PeerAccess::Yes);
        for pair in &mut driver(&mut islands).pairs {
            if pair.a / size == pair.b / size {
                pair.path = PairPath::Nvlink(4);
            }
        }
        let findings = diagnose(&islands);
        let advice = findings.iter().find(|f| f.name == "tensor_parallel").expect("advice");
        let wanted =
            format!("up to {ranks}: NVLink connects at most {size} GPUs with each other; for more ranks");
        assert!(advice.seen.contains(&wanted), "{}", advice.seen);
    }
}

#[test]
fn gpus_that_cuda_does_not_show_count_for_nothing() {
    let mut facts = with_gpus(8, PairPath::Nvlink(18), &PeerAccess::Yes);
    show(&mut facts, "0,1", &[0, 1]);
    // Many faults of GPUs that no rank will use, and of their links to others.
    let side = driver(&mut facts);
    side.gpus[7].memory_used_bytes = 130 * GIB;
    side.gpus[6].prohibited = true;
    side.gpus[5].nvlinks = 12;
    let pair = side.pairs.iter_mut().find(|pair| (pair.a, pair.b) == (1, 4)).expect("a pair");
    pair.peer_access = PeerAccess::No("the chipset does not support it".into());
    let findings = diagnose(&facts);
    let bad: Vec<_> = findings.iter().filter(|f| f.status > Status::Info).collect();
    assert_eq!(bad, Vec::<&Finding>::new());
    let said = |name: &str| &findings.iter().find(|f| f.name == name).expect("said").seen;
    assert!(said("tensor_parallel").contains("up to 2"), "{}", said("tensor_parallel"));
    assert!(
        said("visible_devices").contains("`0,1`: ranks use GPUs 0, 1 only"),
        "{}",
        said("visible_devices")
    );
    let busy = findings.iter().find(|f| f.subject.as_deref() == Some("7")).and_then(|f| f.cause.as_ref());
    assert!(busy.is_some_and(|cause| cause.contains("does not show") && cause.contains("in use already")));
    // Faults of the other GPUs count.
    driver(&mut facts).gpus[1].memory_used_bytes = 130 * GIB;
    assert_eq!(report(&facts).exit_code(), 1);
}

#[test]
fn without_a_gpu_that_cuda_shows_advice_is_for_processors() {
    let mut facts = h200();
    show(&mut facts, "", &[]);
    facts.libraries = libraries(&["cuda_driver", "nccl", "nvrtc", "cublaslt"], false);
    facts.trials.truncate(1);
    let findings = diagnose(&facts);
    let advice = findings.iter().find(|f| f.name == "tensor_parallel").expect("advice");
    assert!(advice.seen.contains("on the CPU"), "{}", advice.seen);
    let bad: Vec<_> = findings.iter().filter(|f| f.status > Status::Info).map(|f| f.name).collect();
    assert_eq!(bad, ["visible_devices"]);
}

#[test]
fn a_gpu_that_mig_cuts_is_known_by_its_place() {
    let mut facts = h200();
    driver(&mut facts).gpus[2].mig = Some(true);
    let instance = VisibleGpu { uuid: "GPU-instance".into(), ..shown(&gpu(2)) };
    facts.gpu.shown = Ok(vec![instance]);
    let bad: Vec<_> = diagnose(&facts).into_iter().filter(|f| f.status > Status::Info).collect();
    assert_eq!(bad.len(), 1);
    assert_eq!(bad[0].subject.as_deref(), Some("2"));
}

use proptest::prelude::*;
use ryzanstein_process_group::schedule::build::CollectiveSpec;
use ryzanstein_process_group::schedule::cost::{rounds, traffic};
use ryzanstein_process_group::schedule::{Algorithm, Hosts};
use ryzanstein_process_group::{Operation, ReduceOp, units};

use super::*;

const LINK: Link = Link { latency: 1e-6, bandwidth: 1e9 };

fn is_close(a: f64, b: f64, relative: f64) -> bool {
    (a - b).abs() <= relative * a.abs().max(b.abs())
}

fn any_all_reduce() -> impl Strategy<Value = AllReduce> {
    proptest::sample::select(AllReduce::ALL.to_vec())
}

proptest! {
    #[test]
    fn more_bytes_never_take_less_time(
        algorithm in any_all_reduce(), ranks in 1usize..40, bytes in 0.0..1e9f64, more in 0.0..1e9f64,
    ) {
        let time = |bytes| {
            let costs = [
                algorithm.cost(ranks, bytes), all_gather(ranks, bytes), reduce_scatter(ranks, bytes),
                broadcast(ranks, bytes), reduce(ranks, bytes), gather(ranks, bytes), all_to_all(ranks, bytes),
            ];
            let hierarchical = Hierarchical::all_reduce(ranks, 4, bytes).seconds(LINK, LINK);
            costs.map(|cost| cost.seconds(LINK) + cost.reduction_seconds(1e10)).into_iter().chain([hierarchical])
        };
        for (less, more) in time(bytes).zip(time(bytes + more)) {
            prop_assert!(less <= more);
        }
    }

    #[test]
    fn one_rank_costs_nothing(algorithm in any_all_reduce(), bytes in 0.0..1e9f64) {
        prop_assert_eq!(algorithm.cost(1, bytes), Cost::default());
        let others = [all_gather, reduce_scatter, broadcast, reduce, gather, all_to_all];
        prop_assert!(others.iter().all(|cost| cost(1, bytes) == Cost::default()));
        prop_assert_eq!(barrier(1), Cost::default());
        prop_assert_eq!(Hierarchical::all_reduce(1, 1, bytes).seconds(LINK, LINK), 0.0);
    }

    #[test]
    fn for_large_vectors_a_ring_takes_the_time_of_its_share(ranks in 2usize..64) {
        let bytes = 1e15;
        let share = 2.0 * (ranks as f64 - 1.0) / ranks as f64;
        let seconds = AllReduce::Ring.cost(ranks, bytes).seconds(LINK);
        prop_assert!(is_close(seconds, share * bytes / LINK.bandwidth, 1e-6));
    }

    #[test]
    fn no_all_reduce_moves_less_than_a_ring_or_takes_fewer_steps_than_one(
        algorithm in any_all_reduce(), ranks in 2usize..64,
    ) {
        let (ring, cost) = (AllReduce::Ring.cost(ranks, 1e6), algorithm.cost(ranks, 1e6));
        prop_assert!(cost.steps >= 1 && cost.reduced >= ring.reduced * (1.0 - 1e-12));
        // Halving-doubling works on the largest power of two, which is fewer ranks.
        prop_assert!(cost.bytes >= ring.bytes * (1.0 - 1e-12));
    }

    /// The schedules that the CPU backend runs send what these formulas say.
    #[test]
    fn steps_and_bytes_are_those_of_the_schedules(ranks in 2usize..33, chunk in 1usize..50) {
        let count = chunk * ranks * ranks.next_power_of_two();
        let hosts = Hosts::one(ranks);
        let of_schedule = |algorithm, count| {
            let operation = Operation::AllReduce(ReduceOp::Sum);
            let spec = CollectiveSpec { operation, algorithm, count, in_place: true };
            let most = (0..ranks).map(|rank| traffic(spec, rank, &hosts).elements).max().unwrap();
            (rounds(spec, &hosts), most as f64)
        };
        let of_model = |algorithm: AllReduce, count: usize| {
            let cost = algorithm.cost(ranks, count as f64);
            (cost.steps, cost.bytes)
        };
        let exact = [
            (AllReduce::Ring, Algorithm::Ring, count),
            (AllReduce::OneShot, Algorithm::Direct, 1),
            // Long enough for two steps.
            (AllReduce::TwoShot, Algorithm::Direct, 10_000 * count),
        ];
        for (model, algorithm, count) in exact {
            let (expected, found) = (of_schedule(algorithm, count), of_model(model, count));
            prop_assert!(expected.0 == found.0 && is_close(expected.1, found.1, 1e-9), "{model}: {expected:?} {found:?}");
        }
        for (model, algorithm) in [
            (AllReduce::RecursiveDoubling, Algorithm::RecursiveDoubling),
            (AllReduce::HalvingDoubling, Algorithm::HalvingDoubling),
        ] {
            let (expected, found) = (of_schedule(algorithm, count), of_model(model, count));
            prop_assert_eq!(expected.0, found.0);
            // With surplus ranks, the way in and the way out are sent by two different ranks, one behind the other.
            let of_another = if ranks.is_power_of_two() { 0.0 } else { count as f64 };
            prop_assert!(is_close(expected.1 + of_another, found.1, 1e-9), "{model}: {expected:?} {found:?}");
        }
    }

    #[test]
    fn a_fit_recovers_latency_and_bandwidth(
        latency in 1e-7..1e-3f64, bandwidth in 1e8..1e12f64, ranks in 2usize..17, algorithm in any_all_reduce(),
    ) {
        let link = Link { latency, bandwidth };
        let sizes = (0..11).map(|power| 1e3 * 4f64.powi(power));
        let points: Vec<_> = sizes.map(|bytes| algorithm.cost(ranks, bytes)).map(|c| (c, c.seconds(link))).collect();
        let fitted = Link::fit(&points).unwrap();
        prop_assert!(is_close(fitted.latency, latency, 1e-4), "{fitted:?}");
        prop_assert!(is_close(fitted.bandwidth, bandwidth, 1e-4), "{fitted:?}");
    }

    #[test]
    fn a_fit_of_noisy_times_is_as_near_as_the_noise(
        noise in proptest::collection::vec(0.95..1.05f64, 11), latency in 1e-6..1e-4f64, bandwidth in 1e9..1e11f64,
    ) {
        let link = Link { latency, bandwidth };
        let sizes = (0..11).map(|power| Cost::message(8f64.powi(power)));
        let points: Vec<_> = sizes.zip(noise).map(|(cost, noise)| (cost, cost.seconds(link) * noise)).collect();
        let fitted = Link::fit(&points).unwrap();
        prop_assert!(is_close(fitted.latency, latency, 0.1) && is_close(fitted.bandwidth, bandwidth, 0.2), "{fitted:?}");
    }
}

#[test]
fn points_that_determine_no_link_are_refused_with_the_reason() {
    let fit = |points: &[(f64, f64)]| {
        let points: Vec<_> =
            points.iter().map(|(bytes, seconds)| (Cost::message(*bytes), *seconds)).collect();
        Link::fit(&points)
    };
    assert_eq!(fit(&[]), Err(FitError::Undetermined));
    assert_eq!(fit(&[(1e3, 1e-6)]), Err(FitError::Undetermined));
    assert_eq!(fit(&[(1e3, 1e-6), (1e3, 2e-6)]), Err(FitError::Undetermined));
    assert_eq!(fit(&[(1e3, 2e-6), (1e6, 1e-6)]), Err(FitError::Flat));
    assert_eq!(fit(&[(1e3, 1e-6), (1e6, 0.0)]), Err(FitError::Point(1)));
    assert_eq!(fit(&[(f64::NAN, 1e-6)]), Err(FitError::Point(0)));
    // Faster than any latency allows.
    let link = fit(&[(1e3, 0.5e-6), (1e6, 1e-3)]).unwrap();
    assert!(link.latency == 0.0 && link.bandwidth > 0.0);
}

#[test]
fn within_hosts_and_between_them_is_faster_than_one_ring_over_the_slow_links() {
    let (within, between) = (Interconnect::NvLink3.link(), Interconnect::InfinibandHdr.link());
    let hierarchical = Hierarchical::all_reduce(4, 8, 100e6).seconds(within, between);
    assert!(hierarchical < AllReduce::Ring.cost(32, 100e6).seconds(between) / 3.0);
    // 7/8 of the bytes within a host, twice; of an eighth, 3/4 between hosts, twice.
    let cost = Hierarchical::all_reduce(4, 8, 64.0);
    assert_eq!((cost.within.steps, cost.within.bytes), (14, 112.0));
    assert_eq!((cost.between.steps, cost.between.bytes), (6, 12.0));
}

#[test]
fn every_interconnect_is_found_by_its_name() {
    for interconnect in Interconnect::ALL {
        assert_eq!(interconnect.name().parse(), Ok(interconnect));
        assert_eq!(interconnect.to_string(), interconnect.name());
    }
    let error = "token ring".parse::<Interconnect>().unwrap_err().to_string();
    assert!(error.contains("`token ring`") && error.contains("nvlink4"), "{error}");
    assert!(is_close(Interconnect::Pcie4.gigabytes_per_second(), 31.508, 1e-4));
}

#[test]
fn the_table_of_gradients_has_the_published_sizes_and_the_times_of_a_ring() {
    let gigabytes = GRADIENTS.map(|model| (model.bytes() as f64 / 1e8).round() / 10.0);
    assert_eq!(gigabytes, [0.1, 1.3, 6.2, 700.0]);
    let table = gradient_table(8);
    let at = |interconnect| Interconnect::ALL.iter().position(|i| *i == interconnect).unwrap();
    // 102 MB, of which a ring of eight moves 7/4, at 25 GB/s.
    let hdr = table[0].seconds[at(Interconnect::InfinibandHdr)];
    assert!(is_close(hdr, 7.19e-3, 0.01), "{hdr}");
    let nvlink = table[1].seconds[at(Interconnect::NvLink3)];
    assert!(is_close(nvlink, 7.83e-3, 0.01), "{nvlink}");
    assert!(table.windows(2).all(|rows| rows[0].seconds.iter().zip(rows[1].seconds).all(|(a, b)| *a < b)));
}

#[test]
fn the_book_has_the_table_of_gradients() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/plan.md");
    let page = std::fs::read_to_string(page).unwrap();
    for GradientRow { gradients, seconds } in gradient_table(8) {
        let times = seconds.map(|s| units::time(s * 1e6)).join(" | ").replace(" us", " µs");
        let row = format!("| {} | {} | {times} |", gradients.model, units::bytes(gradients.bytes() as f64));
        assert!(page.contains(&row), "docs/src/plan.md lacks: {row}");
    }
}

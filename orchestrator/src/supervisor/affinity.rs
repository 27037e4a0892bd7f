//! Divides the processors of a host among its ranks, so that the scheduler cannot put two ranks that wait for each other on one.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use ryzanstein_config::{BackendChoice, BindChoice, Config};

const PROCESSORS: &str = "/sys/devices/system/cpu";
const NODES: &str = "/sys/devices/system/node";
/// One folder for each GPU that this host or container shows, named by its PCI address.
const GPUS: &str = "/proc/driver/nvidia/gpus";

/// A processor that the ranks may use.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Processor {
    /// Its NUMA node.
    node: usize,
    /// The lowest number among the hyper-threads of its core.
    core: usize,
    number: usize,
}

/// Returns the processors of each of `ranks` on this host. Empty if the ranks share all processors of this process: because the
/// user wants it, because there are fewer processors than ranks, or because a cgroup allows less time than the processors have;
/// ranks with processors of their own would not know that they share that time.
pub(super) fn of_ranks(config: &Config, ranks: usize) -> Vec<CpuSet> {
    if config.launch.bind == BindChoice::None {
        return Vec::new();
    }
    let processors = processors();
    let usable = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    if processors.len() < ranks.max(1) || usable < processors.len() {
        return Vec::new();
    }
    let gpus = if config.process_group.backend == BackendChoice::Tcp { Vec::new() } else { nodes_of_gpus() };
    let near: Option<Vec<usize>> = (0..ranks).map(|rank| *gpus.get(rank)?).collect();
    let next_to_gpus = near.and_then(|near| divide_by_node(&processors, &near));
    let shares = next_to_gpus.unwrap_or_else(|| divide(&processors, ranks));
    shares.iter().map(|share| set(share)).collect()
}

fn set(processors: &[usize]) -> CpuSet {
    let mut set = CpuSet::new();
    for number in processors {
        set.set(*number);
    }
    set
}

/// Divides the processors of each node among the ranks whose GPUs are there. `near` is each rank's node. Returns `None` if a node
/// has fewer processors than ranks.
fn divide_by_node(processors: &[Processor], near: &[usize]) -> Option<Vec<Vec<usize>>> {
    let mut shares = vec![Vec::new(); near.len()];
    for node in near {
        let ranks: Vec<usize> = (0..near.len()).filter(|rank| near[*rank] == *node).collect();
        let here: Vec<Processor> = processors.iter().copied().filter(|it| it.node == *node).collect();
        if here.len() < ranks.len() {
            return None;
        }
        for (rank, share) in ranks.iter().zip(divide(&here, ranks.len())) {
            shares[*rank] = share;
        }
    }
    Some(shares)
}

/// Divides the processors, at least one for each rank, into contiguous shares of whole cores.
fn divide(processors: &[Processor], ranks: usize) -> Vec<Vec<usize>> {
    let mut sorted = processors.to_vec();
    sorted.sort_unstable();
    let cores: Vec<&[Processor]> = sorted.chunk_by(|a, b| (a.node, a.core) == (b.node, b.core)).collect();
    if cores.len() >= ranks {
        split(&cores, ranks)
    } else {
        split(&sorted.chunks(1).collect::<Vec<_>>(), ranks)
    }
}

/// Splits the cores, at least one for each rank, where one node ends if the even shares of some ranks end within a core of it.
fn split(cores: &[&[Processor]], ranks: usize) -> Vec<Vec<usize>> {
    let count = cores.len();
    let ends_node = |at: &usize| cores[at - 1][0].node != cores[*at][0].node;
    let between = (1..count).filter(ends_node).find_map(|at| {
        let before = (at * ranks + count / 2) / count;
        let is_near = (before * count).abs_diff(at * ranks) < ranks;
        (is_near && 0 < before && before < ranks).then_some((at, before))
    });
    if let Some((at, before)) = between {
        return [split(&cores[..at], before), split(&cores[at..], ranks - before)].concat();
    }
    let share = |rank: usize| &cores[rank * count / ranks..(rank + 1) * count / ranks];
    let numbers = |rank| share(rank).iter().flat_map(|core| core.iter().map(|it| it.number)).collect();
    (0..ranks).map(numbers).collect()
}

/// Returns the processors that this process may use; none if the system does not tell, or refuses to bind processes.
fn processors() -> Vec<Processor> {
    let allowed = match sched_getaffinity(None).and_then(|own| sched_setaffinity(None, &own).map(|()| own)) {
        Ok(allowed) => allowed,
        Err(error) => {
            tracing::warn!(
                "the system does not let ryz bind ranks to processors: {error}; ranks share them (--bind none silences this)"
            );
            return Vec::new();
        }
    };
    let nodes: Vec<(usize, Vec<usize>)> = folders(NODES)
        .filter_map(|name| {
            Some((name.strip_prefix("node")?.parse().ok()?, list(&format!("{NODES}/{name}/cpulist"))))
        })
        .collect();
    let processor = |number: usize| {
        let node = nodes.iter().find(|(_, processors)| processors.contains(&number));
        let siblings = list(&format!("{PROCESSORS}/cpu{number}/topology/thread_siblings_list"));
        Processor {
            node: node.map_or(0, |(node, _)| *node),
            core: siblings.into_iter().min().unwrap_or(number),
            number,
        }
    };
    (0..CpuSet::MAX_CPU).filter(|number| allowed.is_set(*number)).map(processor).collect()
}

/// Returns the node of each GPU in the order of CUDA's numbers, as far as it is known: CUDA counts equal GPUs by PCI address.
fn nodes_of_gpus() -> Vec<Option<usize>> {
    let mut addresses: Vec<String> = folders(GPUS).collect();
    addresses.sort();
    let node = |address: &String| {
        let path = format!("/sys/bus/pci/devices/{address}/numa_node");
        // -1 on machines with a single node.
        std::fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    let nodes: Vec<Option<usize>> = addresses.iter().map(node).collect();
    match std::env::var("CUDA_VISIBLE_DEVICES") {
        // Any name but a number is not known here.
        Ok(visible) => visible.split(',').map(|gpu| *nodes.get(gpu.trim().parse::<usize>().ok()?)?).collect(),
        Err(_) => nodes,
    }
}

fn folders(path: &str) -> impl Iterator<Item = String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok())
}

/// Reads a file with a list of numbers, such as `0-3,8`; empty if it is missing.
fn list(path: &str) -> Vec<usize> {
    parse(&std::fs::read_to_string(path).unwrap_or_default())
}

fn parse(list: &str) -> Vec<usize> {
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some(first.parse().ok()?..=last.parse().ok()?)
    };
    list.trim().split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Creates a host with this number of cores on each node, numbered as Linux does: first threads first.
    fn host(cores: &[usize], threads: usize) -> Vec<Processor> {
        let nodes: Vec<usize> =
            cores.iter().enumerate().flat_map(|(node, cores)| vec![node; *cores]).collect();
        let all = nodes.len();
        let processor = |number: usize| Processor { node: nodes[number % all], core: number % all, number };
        (0..all * threads).map(processor).collect()
    }

    #[test]
    fn shares_are_whole_cores_and_end_with_the_nodes() {
        let of = |cores: &[usize], threads, ranks| divide(&host(cores, threads), ranks);
        assert_eq!(of(&[2], 1, 2), [[0], [1]]);
        assert_eq!(of(&[2, 2], 2, 2), [[0, 4, 1, 5], [2, 6, 3, 7]]);
        assert_eq!(of(&[1], 2, 2), [[0], [1]], "hyper-threads, where there are too few cores");
        assert_eq!(of(&[4, 3], 1, 4), [vec![0, 1], vec![2, 3], vec![4], vec![5, 6]]);
        assert_eq!(
            of(&[15, 1], 1, 2).iter().map(Vec::len).collect::<Vec<_>>(),
            [8, 8],
            "a stray core is no reason for unequal shares"
        );
        assert_eq!(of(&[1, 1, 1, 1], 1, 2), [[0, 1], [2, 3]]);
    }

    #[test]
    fn ranks_are_next_to_their_gpus_if_there_is_room() {
        let host = host(&[4, 4], 1);
        assert_eq!(divide_by_node(&host, &[1, 0, 1]), Some(vec![vec![4, 5], vec![0, 1, 2, 3], vec![6, 7]]));
        assert_eq!(divide_by_node(&host, &[0; 5]), None);
        assert_eq!(divide_by_node(&host, &[2]), None, "none of that node's processors may be used");
    }

    #[test]
    fn lists_are_those_of_linux() {
        assert_eq!(parse("0-2,8\n"), [0, 1, 2, 8]);
        assert!(parse("").is_empty() && parse("\n").is_empty());
    }

    proptest! {
        #[test]
        fn every_processor_has_one_rank_and_every_rank_its_fair_share(
            cores in prop::collection::vec(0usize..9, 1..5),
            threads in 1usize..3,
            hidden in prop::collection::vec(any::<bool>(), 64),
            ranks in 1usize..20,
        ) {
            // The user may have hidden any processors from the launcher.
            let processors: Vec<Processor> =
                host(&cores, threads).into_iter().filter(|it| !hidden[it.number % hidden.len()]).collect();
            prop_assume!(processors.len() >= ranks);
            let shares = divide(&processors, ranks);
            prop_assert_eq!(shares.len(), ranks);
            prop_assert!(shares.iter().all(|share| !share.is_empty()));
            let mut used = shares.concat();
            used.sort_unstable();
            prop_assert_eq!(used, processors.iter().map(|it| it.number).collect::<Vec<_>>());

            let of = |number: &usize| processors.iter().find(|it| it.number == *number).expect("of the host");
            let mut all: Vec<(usize, usize)> = processors.iter().map(|it| (it.node, it.core)).collect();
            all.sort_unstable();
            all.dedup();
            let has_cores = all.len() >= ranks;
            let units = |share: &Vec<usize>| {
                let mut units: Vec<_> =
                    share.iter().map(of).map(|it| (it.node, it.core, if has_cores { 0 } else { it.number })).collect();
                units.sort_unstable();
                units.dedup();
                units
            };
            let shares: Vec<_> = shares.iter().map(units).collect();
            if has_cores {
                prop_assert_eq!(shares.iter().map(Vec::len).sum::<usize>(), all.len(), "no core is torn apart");
            }
            for node in 0..cores.len() {
                let within = shares.iter().filter(|share| share.iter().all(|unit| unit.0 == node)).map(Vec::len);
                let (least, most) = within.fold((usize::MAX, 0), |(least, most), len| (least.min(len), most.max(len)));
                prop_assert!(most <= least.saturating_add(1), "{:?}", shares);
            }
        }
    }
}

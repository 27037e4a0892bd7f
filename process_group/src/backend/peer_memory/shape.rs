//! How many threads and blocks a launch has. Pure.

use super::entry::Entry;

/// From this capability on, GPUs have clusters of blocks, and a kernel can start while the one in front of it ends.
pub(super) const HOPPER: (u32, u32) = (9, 0);
/// Bytes of a vector: what a thread pushes at once.
pub(super) const VECTOR: usize = 16;

/// Most threads of a block.
pub(super) const MOST_THREADS: u32 = 512;

/// How many threads and blocks a launch has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    pub(super) threads: u32,
    pub(super) blocks: u32,
    /// Blocks of a cluster.
    pub(super) cluster: u32,
}

/// A vector for each thread, as far as they fit the GPU. Measured on H200.
pub(super) fn shape(entry: Entry, vectors: usize, ranks: usize, most: u32) -> Shape {
    let (vectors, threads) = match entry {
        Entry::OneShot | Entry::AddNorm => match vectors {
            0..=64 => (vectors, 64),
            65..=32_768 => (vectors, 128),
            32_769..=65_536 => (vectors, 256),
            _ => (vectors, MOST_THREADS),
        },
        Entry::TwoShot => (vectors.div_ceil(ranks), MOST_THREADS),
        Entry::ReduceScatter | Entry::AllGather => match vectors {
            0..=32_768 => (vectors, 128),
            _ => (vectors, MOST_THREADS),
        },
    };
    let blocks = u32::try_from(vectors.div_ceil(threads as usize)).unwrap_or(most);
    Shape { threads, blocks: blocks.clamp(1, most), cluster: 1 }
}

/// A thread for each of the `width` vectors of a row, and a cluster for each row as far as they fit the GPU: a block where a row
/// fits one, otherwise small blocks as long as there is a multiprocessor for each. `resident` blocks fit each of those.
pub(super) fn row_shape(rows: usize, width: usize, multiprocessors: u32, resident: u32) -> Shape {
    let least = width.div_ceil(MOST_THREADS as usize).next_power_of_two() as u32;
    let is_spread =
        |cluster: &u32| least > 1 && rows.saturating_mul(*cluster as usize) <= multiprocessors as usize;
    let cluster = [8, 4, 2].into_iter().find(is_spread).unwrap_or(least).max(least);
    let threads = width.div_ceil(cluster as usize).next_multiple_of(32) as u32;
    let most = (multiprocessors * resident / cluster).max(1);
    let clusters = u32::try_from(rows).unwrap_or(most).clamp(1, most);
    Shape { threads, blocks: clusters * cluster, cluster }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::gpu::MOST_ROW;

    #[test]
    fn a_launch_has_a_thread_for_each_vector_as_far_as_they_fit() {
        let of = |entry, vectors, ranks, most| {
            let Shape { threads, blocks, cluster } = shape(entry, vectors, ranks, most);
            assert_eq!(cluster, 1);
            (threads, blocks)
        };
        assert_eq!(of(Entry::OneShot, 64, 2, 264), (64, 1));
        assert_eq!(of(Entry::OneShot, 4096, 2, 264), (128, 32));
        assert_eq!(of(Entry::OneShot, 1 << 17, 2, 264), (512, 256));
        assert_eq!(of(Entry::TwoShot, 1 << 20, 2, 264), (512, 264));
        assert_eq!(of(Entry::TwoShot, 3, 4, 132), (512, 1));
    }

    #[test]
    fn a_cluster_has_a_thread_for_each_vector_of_a_row() {
        for width in 1..=MOST_ROW / VECTOR {
            for rows in [0, 1, 3, 128, 5000] {
                let Shape { threads, blocks, cluster } = row_shape(rows, width, 132, 2);
                assert!((cluster * threads) as usize >= width, "{width}");
                assert!(
                    threads <= MOST_THREADS && threads % 32 == 0 && cluster <= 8 && cluster.is_power_of_two()
                );
                assert!(
                    blocks % cluster == 0 && (cluster..=264).contains(&blocks),
                    "{rows} of {width}: {blocks}"
                );
            }
        }
    }

    #[test]
    fn long_rows_are_spread_while_there_is_room() {
        let of = |rows, width| {
            let Shape { threads, blocks, cluster } = row_shape(rows, width, 132, 2);
            (threads, blocks, cluster)
        };
        assert_eq!(of(1, 512), (512, 1, 1));
        assert_eq!(of(16, 1024), (128, 128, 8));
        assert_eq!(of(32, 1024), (256, 128, 4));
        assert_eq!(of(64, 1024), (512, 128, 2));
        assert_eq!(of(128, 1024), (512, 256, 2));
        assert_eq!(of(1000, 1024), (512, 264, 2));
    }
}

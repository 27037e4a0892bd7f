//! The number of threads and blocks of a launch. Pure.

/// Compute capability from which GPUs have clusters of blocks, and a kernel can start while the previous one ends.
pub(super) const HOPPER: (u32, u32) = (9, 0);
/// Bytes of a vector: the amount that a thread pushes at once.
pub(super) const VECTOR: usize = 16;

/// Maximum number of threads of a block that handles rows.
pub(super) const MOST_ROW_THREADS: u32 = 1024;
/// One block handles a row of up to this many vectors. If there are few rows, a cluster of blocks shares each longer one.
pub(super) const SHORT_ROW: usize = 512;
/// Maximum number of threads of a block of any other kernel.
pub(super) const MOST_THREADS: u32 = 256;

/// The number of threads and blocks of a launch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    pub(super) threads: u32,
    pub(super) blocks: u32,
    /// Number of blocks of a cluster.
    pub(super) cluster: u32,
}

/// Returns a thread for each vector, as far as they fit the GPU: in small blocks unless these fill it.
pub(super) fn shape(vectors: usize, most: u32) -> Shape {
    let threads = if vectors <= 32_768 { 128 } else { MOST_THREADS };
    let blocks = u32::try_from(vectors.div_ceil(threads as usize)).unwrap_or(most);
    Shape { threads, blocks: blocks.clamp(1, most), cluster: 1 }
}

/// Returns a thread for each of the `width` vectors of a row, and a block or a cluster of them for each row, as far as they fit the
/// GPU: one block per multiprocessor. A few long rows are spread over clusters of small blocks.
pub(super) fn row_shape(rows: usize, width: usize, multiprocessors: u32) -> Shape {
    let least = width.div_ceil(MOST_ROW_THREADS as usize).next_power_of_two() as u32;
    let is_spread = |cluster: &u32| rows.saturating_mul(*cluster as usize) <= multiprocessors as usize;
    let spread = [8, 4].into_iter().filter(|_| width > SHORT_ROW).find(is_spread);
    let cluster = spread.unwrap_or(least).max(least);
    let threads = width.div_ceil(cluster as usize).next_multiple_of(32) as u32;
    let most = (multiprocessors / cluster).max(1);
    let clusters = u32::try_from(rows).unwrap_or(most).clamp(1, most);
    Shape { threads, blocks: clusters * cluster, cluster }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::paths::gpu::MOST_ROW;

    #[test]
    fn a_launch_has_a_thread_for_each_vector_as_far_as_they_fit() {
        for vectors in [1, 64, 4096, 1 << 15, 1 << 17, 1 << 20] {
            let Shape { threads, blocks, cluster } = shape(vectors, 528);
            assert!(threads <= MOST_THREADS && threads.is_multiple_of(32) && (1..=528).contains(&blocks));
            assert_eq!(cluster, 1);
            assert!(blocks == 528 || (threads * blocks) as usize >= vectors, "{vectors}");
        }
        assert_eq!(shape(usize::MAX, 528).blocks, 528);
    }

    #[test]
    fn a_cluster_has_a_thread_for_each_vector_of_a_row() {
        for width in 1..=MOST_ROW / VECTOR {
            for rows in [0, 1, 3, 128, 5000] {
                let Shape { threads, blocks, cluster } = row_shape(rows, width, 132);
                assert!((cluster * threads) as usize >= width, "{width}");
                assert!(
                    threads <= MOST_ROW_THREADS
                        && threads % 32 == 0
                        && cluster <= 8
                        && cluster.is_power_of_two()
                );
                assert!(
                    blocks % cluster == 0 && (cluster..=132).contains(&blocks),
                    "{rows} of {width}: {blocks}"
                );
            }
        }
    }
}

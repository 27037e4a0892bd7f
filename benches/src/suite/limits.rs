//! Refuses measurements that are impossible, before anything is started or allocated. Pure, except for the size of the memory.

use ryzanstein_process_group::{Error, units};

use super::Request;
use crate::cgroup;
use ryzanstein_orchestrator::plural;

/// Maximum number of timed calls, and of calls before them. A sample of each call is kept, and sent to the other ranks.
pub const MOST_CALLS: usize = 1_000_000;

/// The largest array: more than the memory of a GPU or of a usual host.
pub const MOST_BYTES: u64 = 1 << 40;

impl Request {
    /// Refuses more calls or larger arrays than can be measured.
    ///
    /// # Errors
    /// [`Error::Configuration`] names the flag, the limit and its reason.
    pub fn check(&self) -> Result<(), Error> {
        for (flag, calls) in [("--iters", self.iterations), ("--warmup", self.warmup)] {
            if let Some(calls) = calls.filter(|calls| *calls > MOST_CALLS) {
                return Err(Error::Configuration(format!(
                    "{flag} {calls}: at most {MOST_CALLS} calls are measured, as every call is kept as a sample; percentiles \
                     gain nothing from more"
                )));
            }
        }
        check_sizes(&self.sizes)
    }

    /// Refuses arrays that do not fit the memory of a host for all its ranks.
    pub(super) fn check_memory(&self, ranks: usize, memory: u64) -> Result<(), Error> {
        let is_apart = self.ops.iter().any(|op| op.out_of_place);
        check_fit(&self.sizes, if is_apart { 2 } else { 1 }, ranks, memory)
    }
}

/// Refuses larger arrays than can be measured.
///
/// # Errors
/// [`Error::Configuration`] names the limit and its reason.
pub fn check_sizes(sizes: &[u64]) -> Result<(), Error> {
    if let Some(bytes) = sizes.iter().max().filter(|bytes| **bytes > MOST_BYTES) {
        return Err(Error::Configuration(format!(
            "a size of {}: arrays of at most {} are measured, since every rank holds one or more of them in its memory; \
             name smaller sizes with --sizes, or with --max-bytes",
            units::bytes(*bytes as f64),
            units::bytes(MOST_BYTES as f64)
        )));
    }
    Ok(())
}

/// Refuses sizes, in bytes, whose arrays do not fit `memory` bytes. All ranks share the memory, and each holds `arrays` arrays of
/// the largest size.
///
/// # Errors
/// [`Error::Configuration`] states the required and the available memory.
pub fn check_fit(sizes: &[u64], arrays: u64, ranks: usize, memory: u64) -> Result<(), Error> {
    let Some(&largest) = sizes.iter().max() else { return Ok(()) };
    let needed = u128::from(largest) * u128::from(arrays) * ranks as u128;
    if needed > u128::from(memory) {
        return Err(Error::Configuration(format!(
            "a size of {} needs {} of memory for the {} on this host, which has {}; measure smaller sizes, or fewer ranks",
            units::bytes(largest as f64),
            units::bytes(needed as f64),
            plural(ranks, "rank"),
            units::bytes(memory as f64)
        )));
    }
    Ok(())
}

/// Returns the bytes of memory of this host, or of this process's cgroup if that is less.
pub fn host_memory() -> u64 {
    let info = rustix::system::sysinfo();
    let installed = info.totalram.saturating_mul(info.mem_unit.into());
    cgroup::limits().1.map_or(installed, |limit| limit.min(installed))
}

#[cfg(test)]
mod tests {
    use ryzanstein_process_group::{DType, ReduceOp};

    use super::*;
    use crate::measure::Collective;

    fn request(op: Collective, bytes: u64) -> Request {
        Request {
            ops: vec![op.into()],
            sizes: vec![1000, bytes],
            dtype: DType::F32,
            reduction: ReduceOp::Sum,
            warmup: None,
            iterations: None,
            graph: false,
            paths: vec!["auto".into()],
            judged: false,
            part: None,
        }
    }

    fn refused(outcome: Result<(), Error>, words: &[&str]) {
        let error = outcome.unwrap_err();
        assert!(matches!(error, Error::Configuration(_)), "{error}");
        let said = error.to_string();
        assert!(words.iter().all(|word| said.contains(word)), "{said}");
    }

    #[test]
    fn more_calls_or_bytes_than_can_be_measured_are_refused_by_their_flag() {
        let good = request(Collective::AllReduce, MOST_BYTES);
        assert!(Request { iterations: Some(MOST_CALLS), ..good.clone() }.check().is_ok());
        refused(
            Request { iterations: Some(MOST_CALLS + 1), ..good.clone() }.check(),
            &["--iters 1000001", "at most"],
        );
        refused(Request { warmup: Some(usize::MAX), ..good }.check(), &["--warmup", "at most 1000000"]);
        refused(request(Collective::AllReduce, MOST_BYTES + 1).check(), &["a size of", "--sizes"]);
    }

    #[test]
    fn arrays_must_fit_the_memory_of_all_ranks_of_a_host() {
        assert!(request(Collective::AllReduce, 1 << 20).check_memory(4, 4 << 20).is_ok());
        refused(
            request(Collective::AllReduce, 1 << 20).check_memory(5, 4 << 20),
            &["5 ranks", "fewer ranks"],
        );
        // One array to read and one to write.
        refused(request(Collective::AllToAll, 1 << 20).check_memory(4, 4 << 20), &["8.39 MB", "4 ranks"]);
    }
}

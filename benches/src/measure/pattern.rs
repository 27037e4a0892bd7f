//! The value of every element before a call, and the expected value after it. Pure.
//!
//! Operands are small integers, so that every reduction is exact in every element type and order. They repeat with a prime
//! period: filling and comparing run at memory speed, and a chunk in the wrong place, of the wrong rank or of an earlier call
//! is still detected.

use std::ops::Range;

use half::{bf16, f16};
use rayon::prelude::*;
use ryzanstein_process_group::{DType, Error, ReduceOp};

use super::collective::{Collective, Partner, partner};

/// The period of a pattern in elements: a prime, so that chunk lengths are rarely multiples of it.
const PERIOD: usize = 1021;
/// Fill byte of receiving memory: a NaN for floats, and an integer that no pattern contains.
pub(super) const POISON: u8 = 0xFF;
/// The phase shift from one chunk to the next, and from one call to the next.
const PER_CHUNK: usize = 389;
const PER_CALL: usize = 131;

/// The contents of a run of elements.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Content {
    /// The contribution of a rank to a reduction.
    Operand(usize),
    /// The reduction of all operands, after this many calls on the same memory.
    Reduced(usize),
    /// The data that a rank sends in operations that do not reduce.
    Payload(usize),
    /// Memory that the call must overwrite.
    Poison,
    /// Unspecified.
    Anything,
}

struct Piece {
    range: Range<usize>,
    content: Content,
    /// The chunk that the pattern belongs to.
    chunk: usize,
}

/// All patterns of one measurement on one rank.
#[derive(Debug)]
pub(super) struct Patterns {
    what: Collective,
    dtype: DType,
    rank: usize,
    world_size: usize,
    /// Number of elements of a chunk, or of the vector.
    count: usize,
    tables: Vec<(Content, Vec<u8>)>,
    /// True if input and output are separate buffers.
    out_of_place: bool,
    /// Number of periods per task when several threads fill or compare.
    periods: usize,
}

/// Number of periods per task of several threads: about a megabyte.
const PERIODS: usize = 256;

impl Patterns {
    /// Sets whether calls have separate input and output.
    pub(super) fn out_of_place(mut self, separate: bool) -> Self {
        self.out_of_place = separate;
        self
    }

    /// Sets whether several threads fill and compare.
    pub(super) fn on_threads(mut self, several: bool) -> Self {
        self.periods = if several { PERIODS } else { usize::MAX };
        self
    }

    /// Creates patterns for `count` elements (a chunk, where the operation has chunks), and up to `chain` calls on the same
    /// memory.
    pub(super) fn new(
        what: Collective,
        reduction: ReduceOp,
        dtype: DType,
        (rank, world_size): (usize, usize),
        count: usize,
        chain: usize,
    ) -> Result<Self, Error> {
        let mut tables = Vec::new();
        if what.reduces() {
            let operands = Operands::that_fit(reduction, dtype, world_size)?;
            let table = |value: &dyn Fn(usize) -> u64| encode(dtype, (0..PERIOD).map(value));
            tables.push((Content::Operand(rank), table(&|i| operands.of(rank, i))));
            for calls in 1..=chain {
                let again = (world_size as u64).saturating_pow(calls as u32 - 1);
                tables.push((Content::Reduced(calls), table(&|i| operands.reduced(i) * again)));
            }
        } else if what != Collective::Barrier {
            let letters = (0..world_size).map(|r| {
                (Content::Payload(r), encode(dtype, (0..PERIOD).map(|i| (r as u64 * 31 + mix(i)) % 120)))
            });
            tables.extend(letters);
        }
        Ok(Self { what, dtype, rank, world_size, count, tables, out_of_place: false, periods: usize::MAX })
    }

    /// Returns the number of elements of the whole array.
    pub(super) fn elements(&self) -> usize {
        match self.what {
            Collective::Barrier => 0,
            what if what.is_chunked() => self.count * self.world_size,
            _ => self.count,
        }
    }

    /// Returns the number of elements of the buffer with the result, which also holds the operand if the call is in place.
    pub(super) fn buffer_elements(&self) -> usize {
        match self.what {
            Collective::ReduceScatter | Collective::Scatter if self.out_of_place => self.count,
            _ => self.elements(),
        }
    }

    /// Returns the number of elements of the input of a call out of place.
    pub(super) fn input_elements(&self) -> Option<usize> {
        self.out_of_place.then(|| match self.what {
            Collective::AllGather | Collective::Gather => self.count,
            _ => self.elements(),
        })
    }

    /// Writes the input of a call out of place.
    pub(super) fn fill_input(&self, bytes: &mut [u8], call: usize) {
        self.fill(bytes, &self.input(), call);
    }

    /// Writes the contents of the buffer before call number `call`.
    pub(super) fn fill_buffer(&self, bytes: &mut [u8], call: usize) {
        self.fill(bytes, &self.before(), call);
    }

    /// Counts wrong elements in the buffer after call number `call` was made `repeats` times.
    pub(super) fn wrong(&self, bytes: &[u8], call: usize, repeats: usize) -> u64 {
        let size = self.dtype.size();
        self.after(repeats)
            .iter()
            .filter_map(|piece| {
                let table = self.table(piece.content)?;
                let bytes = &bytes[piece.range.start * size..piece.range.end * size];
                let phase = phase(piece.chunk, call);
                let one = |bytes: &[u8]| compare(bytes, table, phase, size);
                Some(match self.piece(table) {
                    // Whole periods per task, so all have the same phase.
                    Some(length) => bytes.par_chunks(length).map(one).sum(),
                    None => one(bytes),
                })
            })
            .sum()
    }

    fn whole(&self, content: Content) -> Vec<Piece> {
        vec![Piece { range: 0..self.count, content, chunk: 0 }]
    }

    fn chunk(&self, index: usize, content: Content) -> Piece {
        Piece { range: index * self.count..(index + 1) * self.count, content, chunk: index }
    }

    /// Returns one piece per chunk, with the content of each.
    fn chunks(&self, content: impl Fn(usize) -> Content) -> Vec<Piece> {
        (0..self.world_size).map(|index| self.chunk(index, content(index))).collect()
    }

    /// Returns the pieces of a buffer that is one chunk.
    fn only_chunk(&self, index: usize, content: Content) -> Vec<Piece> {
        vec![Piece { range: 0..self.count, content, chunk: index }]
    }

    fn input(&self) -> Vec<Piece> {
        let me = self.rank;
        match self.what {
            Collective::AllReduce | Collective::Reduce => self.whole(Content::Operand(me)),
            Collective::ReduceScatter => self.chunks(|_| Content::Operand(me)),
            Collective::AllGather | Collective::Gather => self.only_chunk(me, Content::Payload(me)),
            Collective::Scatter | Collective::AllToAll => self.chunks(|_| Content::Payload(me)),
            Collective::Broadcast | Collective::SendRecv | Collective::Barrier => {
                self.whole(Content::Payload(me))
            }
        }
    }

    fn before(&self) -> Vec<Piece> {
        if self.out_of_place {
            return vec![Piece { range: 0..self.buffer_elements(), content: Content::Poison, chunk: 0 }];
        }
        let me = self.rank;
        let own_payload = |p| if p == me { Content::Payload(p) } else { Content::Poison };
        match self.what {
            Collective::AllReduce | Collective::Reduce => self.whole(Content::Operand(me)),
            Collective::ReduceScatter => self.chunks(|_| Content::Operand(me)),
            Collective::Broadcast if me == 0 => self.whole(Content::Payload(0)),
            Collective::Broadcast => self.whole(Content::Poison),
            Collective::AllGather | Collective::Gather => self.chunks(own_payload),
            Collective::Scatter if me == 0 => self.chunks(|_| Content::Payload(0)),
            Collective::Scatter => self.chunks(|_| Content::Poison),
            Collective::AllToAll => self.chunks(|_| Content::Payload(me)),
            Collective::SendRecv => match partner(me, self.world_size) {
                Some(Partner::Receiver(_)) => self.whole(Content::Payload(me)),
                _ => self.whole(Content::Poison),
            },
            Collective::Barrier => Vec::new(),
        }
    }

    fn after(&self, repeats: usize) -> Vec<Piece> {
        let me = self.rank;
        if self.out_of_place {
            match self.what {
                Collective::ReduceScatter => return self.only_chunk(me, Content::Reduced(1)),
                Collective::Scatter => return self.only_chunk(me, Content::Payload(0)),
                Collective::Reduce | Collective::Gather if me != 0 => return self.whole(Content::Anything),
                _ => {}
            }
        }
        let own = |content: Content| move |p: usize| if p == me { content } else { Content::Anything };
        match self.what {
            Collective::AllReduce => self.whole(Content::Reduced(repeats)),
            Collective::Reduce if me == 0 => self.whole(Content::Reduced(repeats)),
            Collective::Reduce => self.whole(Content::Operand(me)),
            Collective::ReduceScatter => self.chunks(own(Content::Reduced(repeats))),
            Collective::Broadcast => self.whole(Content::Payload(0)),
            Collective::AllGather => self.chunks(Content::Payload),
            Collective::Gather if me == 0 => self.chunks(Content::Payload),
            Collective::Gather => self.chunks(own(Content::Payload(me))),
            Collective::Scatter => self.chunks(own(Content::Payload(0))),
            // Every rank's chunk for this rank.
            Collective::AllToAll => {
                let mut pieces = self.chunks(Content::Payload);
                for piece in &mut pieces {
                    piece.chunk = me;
                }
                pieces
            }
            Collective::SendRecv => match partner(me, self.world_size) {
                Some(Partner::Receiver(_)) => self.whole(Content::Payload(me)),
                Some(Partner::Sender(from)) => self.whole(Content::Payload(from)),
                None => self.whole(Content::Anything),
            },
            Collective::Barrier => Vec::new(),
        }
    }

    fn table(&self, content: Content) -> Option<&[u8]> {
        self.tables.iter().find(|(c, _)| *c == content).map(|(_, table)| &table[..])
    }

    /// Returns the bytes per task of several threads; `None` for a single thread.
    fn piece(&self, table: &[u8]) -> Option<usize> {
        table.len().checked_mul(self.periods).filter(|length| *length > 0)
    }

    fn fill(&self, bytes: &mut [u8], pieces: &[Piece], call: usize) {
        let size = self.dtype.size();
        for piece in pieces {
            let bytes = &mut bytes[piece.range.start * size..piece.range.end * size];
            match self.table(piece.content) {
                Some(table) => {
                    let start = phase(piece.chunk, call) * size;
                    match self.piece(table) {
                        Some(length) => bytes.par_chunks_mut(length).for_each(|b| repeat(b, table, start)),
                        None => repeat(bytes, table, start),
                    }
                }
                None => bytes.fill(POISON),
            }
        }
    }
}

/// Returns the number of in-place sums that can run on the same memory with all values exact in every order.
pub(super) fn longest_chain(what: Collective, reduction: ReduceOp, dtype: DType, world_size: usize) -> usize {
    if what != Collective::AllReduce || reduction != ReduceOp::Sum {
        return 1;
    }
    let Ok(operands) = Operands::that_fit(reduction, dtype, world_size) else { return 1 };
    let (first, limit) = (operands.largest(), exact(dtype));
    let fits = |calls: &usize| {
        let factor = (world_size as u64).checked_pow(*calls as u32 - 1);
        factor.and_then(|f| f.checked_mul(first)).is_some_and(|largest| largest <= limit)
    };
    // A longer chain would not show more.
    (2..=8).take_while(fits).last().unwrap_or(1)
}

/// The operands of a reduction.
struct Operands {
    reduction: ReduceOp,
    world_size: usize,
    /// Number of distinct values per rank.
    values: u64,
    /// The difference between consecutive ranks' summands. Even, so that averages are integers.
    step: u64,
}

impl Operands {
    fn that_fit(reduction: ReduceOp, dtype: DType, world_size: usize) -> Result<Self, Error> {
        let limit = exact(dtype);
        let candidates = [(7, 2), (3, 2), (7, 0), (2, 0)];
        candidates
            .into_iter()
            .map(|(values, step)| Self { reduction, world_size, values, step })
            .find(|operands| operands.largest() <= limit)
            .ok_or_else(|| {
                Error::Configuration(format!(
                    "a {reduction} of {dtype} among {world_size} ranks exceeds {limit}, the largest integer exact in {dtype}, so its \
                     values cannot be checked; use a wider type with --dtype"
                ))
            })
    }

    fn of(&self, rank: usize, i: usize) -> u64 {
        match self.reduction {
            ReduceOp::Product => 1 + (mix(i) + rank as u64) % 2,
            // No rank has the smallest or the largest value everywhere.
            ReduceOp::Min | ReduceOp::Max => (mix(i) + 3 * rank as u64) % self.values,
            _ => mix(i) % self.values + self.step * rank as u64,
        }
    }

    fn reduced(&self, i: usize) -> u64 {
        let all = (0..self.world_size).map(|rank| self.of(rank, i));
        match self.reduction {
            ReduceOp::Sum => all.sum(),
            ReduceOp::Product => all.product(),
            ReduceOp::Min => all.min().unwrap_or(0),
            ReduceOp::Max => all.max().unwrap_or(0),
            ReduceOp::Avg => all.sum::<u64>() / self.world_size as u64,
        }
    }

    /// Returns the largest intermediate value, in any order.
    fn largest(&self) -> u64 {
        let n = self.world_size as u64;
        match self.reduction {
            // At most every second operand, rounded up, is 2.
            ReduceOp::Product => 1u64.checked_shl(self.world_size.div_ceil(2) as u32).unwrap_or(u64::MAX),
            ReduceOp::Min | ReduceOp::Max => self.values - 1,
            ReduceOp::Sum | ReduceOp::Avg => n * (self.values - 1) + self.step * n * (n - 1) / 2,
        }
    }
}

/// Returns the bound up to which every integer is exact and no pattern equals poison.
const fn exact(dtype: DType) -> u64 {
    match dtype {
        DType::F16 => 2048,
        DType::BF16 => 256,
        DType::I8 => 127,
        DType::U8 => 254,
        DType::F32 => 1 << 24,
        DType::I32 | DType::U32 => 1 << 30,
        DType::F64 | DType::I64 | DType::U64 => 1 << 52,
    }
}

/// Hashes an index so that neighbouring indices differ widely.
const fn mix(i: usize) -> u64 {
    (i as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40
}

fn phase(chunk: usize, call: usize) -> usize {
    (chunk * PER_CHUNK + call * PER_CALL) % PERIOD
}

fn encode(dtype: DType, values: impl Iterator<Item = u64>) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(PERIOD * dtype.size());
    for v in values {
        match dtype {
            DType::F32 => bytes.extend((v as f32).to_ne_bytes()),
            DType::F64 => bytes.extend((v as f64).to_ne_bytes()),
            DType::F16 => bytes.extend(f16::from_f64(v as f64).to_ne_bytes()),
            DType::BF16 => bytes.extend(bf16::from_f64(v as f64).to_ne_bytes()),
            DType::I8 | DType::U8 => bytes.push(v as u8),
            DType::I32 | DType::U32 => bytes.extend((v as u32).to_ne_bytes()),
            DType::I64 | DType::U64 => bytes.extend(v.to_ne_bytes()),
        }
    }
    bytes
}

/// Fills `bytes` with the table repeatedly, from `start` on.
fn repeat(mut bytes: &mut [u8], table: &[u8], start: usize) {
    let mut from = start;
    while !bytes.is_empty() {
        let length = bytes.len().min(table.len() - from);
        let (now, later) = bytes.split_at_mut(length);
        now.copy_from_slice(&table[from..from + length]);
        (bytes, from) = (later, 0);
    }
}

/// Counts elements that differ from the table, starting at its element `phase`.
fn compare(mut bytes: &[u8], table: &[u8], phase: usize, size: usize) -> u64 {
    let (mut from, mut wrong) = (phase * size, 0);
    while !bytes.is_empty() {
        let length = bytes.len().min(table.len() - from);
        let (now, later) = bytes.split_at(length);
        let want = &table[from..from + length];
        if now != want {
            wrong +=
                now.chunks_exact(size).zip(want.chunks_exact(size)).filter(|(a, b)| a != b).count() as u64;
        }
        (bytes, from) = (later, 0);
    }
    wrong
}

#[cfg(test)]
mod tests;

//! The properties of a call on which its ranks must agree. Profile, mismatch detection, tracing and backends use them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::types::dtype::DType;
use crate::types::rank::Rank;

/// The way in which the contributions of the ranks are combined.
///
/// Integers wrap. A `NaN` on any rank makes the result of every reduction, including `Min` and `Max`, a `NaN`. The 16-bit floats
/// are combined in `f32`. `Avg` is the sum divided by the world size; for integers the wrapped sum is divided, towards zero.
///
/// NCCL differs in two ways: it rounds 16-bit floats after each addition or product, and if the world size is a power of two it
/// divides floats before it adds them, which is the same unless the sum overflows or a quotient is subnormal.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[repr(u8)]
pub enum ReduceOp {
    /// Sum of all.
    Sum,
    /// Product of all.
    Product,
    /// Smallest of all.
    Min,
    /// Largest of all.
    Max,
    /// Mean of all.
    Avg,
}

impl ReduceOp {
    /// Every reduction, in wire order.
    pub const ALL: &'static [Self] = &[Self::Sum, Self::Product, Self::Min, Self::Max, Self::Avg];

    /// Returns the name used in tables and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sum => "sum",
            Self::Product => "product",
            Self::Min => "min",
            Self::Max => "max",
            Self::Avg => "avg",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The operation of a call. Ranks are positions in the group.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Operation {
    /// Every rank gets the reduction of all vectors.
    AllReduce(ReduceOp),
    /// Every rank gets `root`'s vector.
    Broadcast {
        /// The rank with the data.
        root: Rank,
    },
    /// `root` gets the reduction of all vectors; those of the other ranks stay unchanged.
    Reduce {
        /// The reduction.
        op: ReduceOp,
        /// The rank that gets the result.
        root: Rank,
    },
    /// Every rank gets the chunks of all ranks, in rank order.
    AllGather,
    /// Rank `r` gets chunk `r` of the reduction of all vectors.
    ReduceScatter(ReduceOp),
    /// `root` gets the chunks of all ranks, in rank order.
    Gather {
        /// The rank that gets the result.
        root: Rank,
    },
    /// Rank `r` gets chunk `r` of `root`'s vector.
    Scatter {
        /// The rank with the data.
        root: Rank,
    },
    /// Rank `r` gets chunk `r` of every rank, in rank order.
    AllToAll,
    /// One message to one rank.
    Send {
        /// The receiver.
        to: Rank,
    },
    /// One message from one rank.
    Recv {
        /// The sender.
        from: Rank,
    },
    /// No rank continues before all have entered the barrier.
    Barrier,
}

impl Operation {
    /// Returns the name used in configuration, tables, metrics and errors.
    pub const fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Gather { .. } => "gather",
            Self::Scatter { .. } => "scatter",
            Self::AllToAll => "all_to_all",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
            Self::Barrier => "barrier",
        }
    }

    /// Returns the reduction, if there is one.
    pub const fn reduce_op(self) -> Option<ReduceOp> {
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) | Self::Reduce { op, .. } => Some(op),
            _ => None,
        }
    }

    /// Returns the root, if there is one.
    pub const fn root(self) -> Option<Rank> {
        match self {
            Self::Broadcast { root }
            | Self::Reduce { root, .. }
            | Self::Gather { root }
            | Self::Scatter { root } => Some(root),
            _ => None,
        }
    }

    /// Returns the other rank of a message.
    pub(crate) const fn peer(self) -> Option<Rank> {
        match self {
            Self::Send { to: peer } | Self::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// Returns true if the whole array is one chunk per rank: its length is `chunk × world size`.
    pub const fn is_chunked(self) -> bool {
        matches!(
            self,
            Self::AllGather
                | Self::ReduceScatter(_)
                | Self::Gather { .. }
                | Self::Scatter { .. }
                | Self::AllToAll
        )
    }

    /// Returns true if calls of two ranks with these operations match. The two ends of a message match: one sends, the other
    /// receives.
    pub(crate) fn is_same_kind(self, other: Self) -> bool {
        if self.is_point_to_point() && other.is_point_to_point() {
            return self.name() != other.name();
        }
        self.name() == other.name()
    }

    /// Returns true if only two ranks take part.
    pub const fn is_point_to_point(self) -> bool {
        matches!(self, Self::Send { .. } | Self::Recv { .. })
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self {
            Self::AllReduce(op) | Self::ReduceScatter(op) => write!(f, "({op})"),
            Self::Reduce { op, root } => write!(f, "({op}, root {root})"),
            Self::Broadcast { root } | Self::Gather { root } | Self::Scatter { root } => {
                write!(f, "(root {root})")
            }
            Self::Send { to } => write!(f, "(to {to})"),
            Self::Recv { from } => write!(f, "(from {from})"),
            Self::AllGather | Self::AllToAll | Self::Barrier => Ok(()),
        }
    }
}

/// The properties of a call on which all its ranks must agree.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct CallFingerprint {
    /// The operation with its reduction and root. For a message: in the form of its sender.
    pub operation: Operation,
    /// The element type.
    pub dtype: DType,
    /// Number of elements of the vector, or of one chunk where [`Operation::is_chunked`].
    pub count: usize,
    /// The composed call of which this call is a part.
    #[serde(default)]
    pub(crate) composed: Composed,
}

impl CallFingerprint {
    /// Returns the fingerprint of a call that is no part of another.
    pub const fn new(operation: Operation, dtype: DType, count: usize) -> Self {
        Self { operation, dtype, count, composed: Composed::NONE }
    }
}

impl fmt::Display for CallFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operation == Operation::Barrier {
            return self.operation.fmt(f);
        }
        let per = if self.operation.is_chunked() { " a rank" } else { "" };
        write!(f, "{} of {} {}{per}{}", self.operation, self.count, self.dtype, self.composed)
    }
}

/// A call that consists of others, with the parameters that these do not show: on them too the ranks must agree. The kind in 4 bits,
/// the parameters in 28.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Composed(pub(crate) u32);

impl Composed {
    /// Not a composed call.
    pub(crate) const NONE: Self = Self(0);
    /// A broadcast of a value.
    pub(crate) const BROADCAST_OBJECT: Self = Self::of(1, 0);
    /// An all-gather of values.
    pub(crate) const ALL_GATHER_OBJECT: Self = Self::of(2, 0);

    const BITS: u32 = 28;

    const fn of(kind: u32, parameters: u32) -> Self {
        Self((kind << Self::BITS) | (parameters & ((1 << Self::BITS) - 1)))
    }

    /// An all-reduce of 16-bit values, with this number of elements that only fill the last chunks.
    pub(crate) const fn compressed(op: ReduceOp, padding: usize) -> Self {
        Self::of(3, ((op as u32) << 25) | (padding as u32 & ((1 << 25) - 1)))
    }

    /// An all-reduce of arrays.
    pub(crate) fn coalesced(arrays: impl Iterator<Item = (DType, usize)>) -> Self {
        Self::of(4, split(arrays))
    }

    /// A reduction of the gradients of these parameters, in order of registration.
    pub(crate) fn buckets(parameters: impl Iterator<Item = (DType, usize)>) -> Self {
        Self::of(5, split(parameters))
    }

    /// An all-reduce with a norm of rows of this many elements, whose result has this type.
    pub(crate) fn with_norm(result: DType, columns: usize) -> Self {
        Self::of(6, split(std::iter::once((result, columns))))
    }

    const fn kind(self) -> u32 {
        self.0 >> Self::BITS
    }

    const fn parameters(self) -> u32 {
        self.0 & ((1 << Self::BITS) - 1)
    }

    /// Returns the reduction and the padding of a compressed all-reduce.
    fn sent(self) -> (Option<ReduceOp>, u32) {
        (ReduceOp::ALL.get((self.parameters() >> 25) as usize).copied(), self.parameters() & ((1 << 25) - 1))
    }

    /// Returns the first property in which two calls that are equal otherwise differ.
    pub(crate) fn difference(self, other: Self) -> Option<&'static str> {
        match self.kind() {
            _ if self == other => None,
            kind if kind != other.kind() => Some("operation"),
            3 if self.sent().0 != other.sent().0 => Some("reduction"),
            3 => Some("length"),
            _ => Some("split"),
        }
    }
}

/// Returns a digest of the types and lengths of arrays. Mixes words as rustc's FxHash does.
fn split(arrays: impl Iterator<Item = (DType, usize)>) -> u32 {
    const FACTOR: u64 = 0x517c_c1b7_2722_0a95;
    let mix = |digest: u64, word: u64| (digest.rotate_left(5) ^ word).wrapping_mul(FACTOR);
    let add = |digest, (dtype, count): (DType, usize)| mix(mix(digest, dtype as u64), count as u64);
    (arrays.fold(1, add) >> (u64::BITS - Composed::BITS)) as u32
}

impl fmt::Display for Composed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters = self.parameters();
        match self.kind() {
            0 => Ok(()),
            1 => f.write_str(" (part of broadcast_object)"),
            2 => f.write_str(" (part of all_gather_object)"),
            3 => {
                let (op, padding) = self.sent();
                let op = op.map_or("unknown", ReduceOp::name);
                write!(f, " (part of all_reduce_compressed({op}), padding {padding})")
            }
            4 => write!(f, " (part of all_reduce_coalesced, arrays of digest {parameters:07x})"),
            5 => write!(f, " (part of BucketedReducer, parameters of digest {parameters:07x})"),
            6 => write!(f, " (part of all_reduce_add_norm, rows of digest {parameters:07x})"),
            kind => write!(f, " (part of an unknown call {kind})"),
        }
    }
}

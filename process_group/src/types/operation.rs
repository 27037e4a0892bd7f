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
}

impl fmt::Display for CallFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.operation == Operation::Barrier {
            return self.operation.fmt(f);
        }
        let per = if self.operation.is_chunked() { " a rank" } else { "" };
        write!(f, "{} of {} {}{per}", self.operation, self.count, self.dtype)
    }
}

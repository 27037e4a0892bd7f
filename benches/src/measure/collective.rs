//! The measurable operations and their calls.

use std::fmt;
use std::str::FromStr;

use ryzanstein_process_group::{
    Buffer, BufferMut, Error, Operation, ProcessGroup, Rank, ReduceOp, bus_factor,
};

/// A measurable operation. Roots are rank 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Collective {
    /// All-reduce.
    AllReduce,
    /// Broadcast.
    Broadcast,
    /// Reduce.
    Reduce,
    /// All-gather. In place, each rank's own chunk is already in the array.
    AllGather,
    /// Reduce-scatter. In place, each rank's own chunk of the array is the result.
    ReduceScatter,
    /// Gather.
    Gather,
    /// Scatter.
    Scatter,
    /// All-to-all, out of place only.
    AllToAll,
    /// Each even rank sends to the next rank, all pairs at once.
    SendRecv,
    /// No data.
    Barrier,
}

/// An operation, in place or with separate input and output.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct CollectiveForm {
    /// The operation.
    pub what: Collective,
    /// True if input and output are separate.
    pub out_of_place: bool,
}

impl From<Collective> for CollectiveForm {
    /// Returns the form that is measured by default.
    fn from(what: Collective) -> Self {
        Self { what, out_of_place: what.is_out_of_place() }
    }
}

impl fmt::Display for CollectiveForm {
    /// Writes the name, with `_into` for an operation that has both forms and is called out of place.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let form = if self.out_of_place && self.what.has_both_places() { "_into" } else { "" };
        write!(f, "{}{form}", self.what)
    }
}

impl FromStr for CollectiveForm {
    type Err = UnknownCollective;

    fn from_str(text: &str) -> Result<Self, UnknownCollective> {
        if let Some(what) = text.strip_suffix("_into").and_then(|name| name.parse().ok())
            && Collective::has_both_places(what)
        {
            return Ok(Self { what, out_of_place: true });
        }
        Ok(text.parse::<Collective>()?.into())
    }
}

/// The buffers of one call.
#[derive(Debug)]
pub struct CallBuffers<M> {
    /// The input, for operations that are called out of place.
    pub input: Option<M>,
    /// The output, and the input of operations in place.
    pub buffer: M,
}

impl Collective {
    /// Every operation, in the order of `--op all`.
    pub const ALL: [Self; 10] = [
        Self::AllReduce,
        Self::Broadcast,
        Self::Reduce,
        Self::AllGather,
        Self::ReduceScatter,
        Self::Gather,
        Self::Scatter,
        Self::AllToAll,
        Self::SendRecv,
        Self::Barrier,
    ];

    /// Returns the operation's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SendRecv => "send_recv",
            other => other.operation(ReduceOp::Sum).name(),
        }
    }

    /// Returns true if the operation reduces values.
    pub const fn reduces(self) -> bool {
        self.operation(ReduceOp::Sum).reduce_op().is_some()
    }

    /// Returns true if the array consists of one chunk per rank.
    pub const fn is_chunked(self) -> bool {
        self.operation(ReduceOp::Sum).is_chunked()
    }

    /// Returns true if the operation is measured out of place by default.
    pub const fn is_out_of_place(self) -> bool {
        matches!(self, Self::AllToAll)
    }

    /// Returns true if the operation can be measured both in place and out of place.
    pub const fn has_both_places(self) -> bool {
        !matches!(self, Self::AllToAll | Self::SendRecv | Self::Barrier)
    }

    /// Returns the group operation that rank 0 calls.
    pub const fn operation(self, reduction: ReduceOp) -> Operation {
        let root = Rank(0);
        match self {
            Self::AllReduce => Operation::AllReduce(reduction),
            Self::Broadcast => Operation::Broadcast { root },
            Self::Reduce => Operation::Reduce { op: reduction, root },
            Self::AllGather => Operation::AllGather,
            Self::ReduceScatter => Operation::ReduceScatter(reduction),
            Self::Gather => Operation::Gather { root },
            Self::Scatter => Operation::Scatter { root },
            Self::AllToAll => Operation::AllToAll,
            Self::SendRecv => Operation::Send { to: Rank(1) },
            Self::Barrier => Operation::Barrier,
        }
    }

    /// Returns `algbw` and `busbw` in 10⁹ bytes per second of a call of `bytes` bytes (the whole array) that takes `us`
    /// microseconds.
    pub fn bandwidths(self, bytes: usize, us: f64, world_size: usize) -> (f64, f64) {
        let algbw = if us > 0.0 { bytes as f64 / (us * 1e3) } else { 0.0 };
        (algbw, algbw * bus_factor(self.name(), world_size))
    }

    /// Makes one call.
    ///
    /// # Errors
    /// Returns the errors of the collective.
    pub fn call<M: Buffer + BufferMut>(
        self,
        group: &mut ProcessGroup,
        slot: &mut CallBuffers<M>,
        reduction: ReduceOp,
    ) -> Result<(), Error> {
        let root = Rank(0);
        let is_root = group.rank() == root;
        let buffer = &mut slot.buffer;
        if let Some(input) = &slot.input {
            let sent: Option<&dyn Buffer> = is_root.then_some(input);
            return match self {
                Self::AllReduce => group.all_reduce_into(input, buffer, reduction),
                Self::Broadcast => group.broadcast_into(sent, buffer, root),
                Self::Reduce => group.reduce_into(input, is_root.then_some(buffer), reduction, root),
                Self::AllGather => group.all_gather_into(input, buffer),
                Self::ReduceScatter => group.reduce_scatter_into(input, buffer, reduction),
                Self::Gather => group.gather_into(input, is_root.then_some(buffer), root),
                Self::Scatter => group.scatter_into(sent, buffer, root),
                Self::AllToAll => group.all_to_all_into(input, buffer),
                Self::SendRecv | Self::Barrier => {
                    Err(Error::Invalid(format!("{self} has no form out of place")))
                }
            };
        }
        match self {
            Self::AllReduce => group.all_reduce(buffer, reduction),
            Self::Broadcast => group.broadcast(buffer, root),
            Self::Reduce => group.reduce(buffer, reduction, root),
            Self::AllGather => group.all_gather(buffer),
            Self::ReduceScatter => group.reduce_scatter(buffer, reduction),
            Self::Gather => group.gather(buffer, root),
            Self::Scatter => group.scatter(buffer, root),
            Self::AllToAll => group.all_to_all(buffer),
            Self::SendRecv => match partner(group.rank().index(), group.world_size()) {
                Some(Partner::Receiver(to)) => group.send(buffer, Rank(to as u32)),
                Some(Partner::Sender(from)) => group.recv(buffer, Rank(from as u32)),
                None => Ok(()),
            },
            Self::Barrier => group.barrier(),
        }
    }
}

/// A name that is not a measured operation.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("unknown operation `{0}`; expected `all` or some of {names}, separated by commas", names = Collective::ALL.map(Collective::name).join(", "))]
pub struct UnknownCollective(pub String);

/// The other rank of a pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Partner {
    Receiver(usize),
    Sender(usize),
}

/// Returns the rank that a rank exchanges messages with; `None` for the last of an odd number.
pub(super) fn partner(rank: usize, world_size: usize) -> Option<Partner> {
    match rank % 2 {
        0 if rank + 1 < world_size => Some(Partner::Receiver(rank + 1)),
        0 => None,
        _ => Some(Partner::Sender(rank - 1)),
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Collective {
    type Err = UnknownCollective;

    /// Also accepts names without the underscores, or with hyphens: `allreduce`, `all-reduce`.
    fn from_str(text: &str) -> Result<Self, UnknownCollective> {
        let plain = |name: &str| name.replace(['_', '-'], "");
        let found = Self::ALL.into_iter().find(|collective| plain(collective.name()) == plain(text));
        found.ok_or_else(|| UnknownCollective(text.to_owned()))
    }
}

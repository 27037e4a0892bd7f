//! One rank's work in one collective, as a list whose meaning is its execution from top to bottom.
//!
//! The list does not state what may overlap: [`hazards`](super::hazards) derives that from the regions of the nodes.

/// One of the memories of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// The memory that the caller passed for reading. It is the output itself when the call is in place.
    Input,
    /// The memory that the caller passed for writing.
    Output,
    /// Memory of the backend.
    Scratch,
}

/// A run of elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// Its memory.
    pub space: Space,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl Region {
    /// Returns the number of elements.
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns true if it contains no element.
    pub const fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// One operand of a reduction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Source {
    /// The next message from this rank.
    Peer(usize),
    /// This rank's own values.
    Own(Region),
}

/// One step of a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    /// One message to a rank.
    Send {
        /// Receiver.
        to: usize,
        /// The elements to send.
        region: Region,
    },
    /// One message from a rank.
    Receive {
        /// Sender.
        from: usize,
        /// The destination.
        region: Region,
    },
    /// `into = source₀ ∘ source₁ ∘ …`, in this order. With one source, a copy.
    Reduce {
        /// The result.
        into: Region,
        /// The operands, each as long as `into`.
        sources: Vec<Source>,
        /// True if the result contains the contributions of all ranks, so that an average divides here.
        last: bool,
    },
}

impl Node {
    /// Returns the region in which the node's progress is counted.
    pub fn region(&self) -> Region {
        match self {
            Self::Send { region, .. } | Self::Receive { region, .. } => *region,
            Self::Reduce { into, .. } => *into,
        }
    }
}

/// The work of one rank in one call.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// The nodes, in order.
    pub nodes: Vec<Node>,
    /// Number of elements of scratch memory.
    pub scratch: usize,
}

impl Program {
    /// Returns the number of elements that this rank sends.
    pub fn elements_sent(&self) -> usize {
        self.nodes.iter().map(|n| if let Node::Send { region, .. } = n { region.len() } else { 0 }).sum()
    }

    /// Returns the number of elements that this rank receives.
    pub fn elements_received(&self) -> usize {
        let of = |node: &Node| match node {
            Node::Receive { region, .. } => region.len(),
            Node::Reduce { into, sources, .. } => {
                into.len() * sources.iter().filter(|source| matches!(source, Source::Peer(_))).count()
            }
            Node::Send { .. } => 0,
        };
        self.nodes.iter().map(of).sum()
    }

    /// Returns the number of messages that this rank sends.
    pub fn messages_sent(&self) -> usize {
        self.nodes.iter().filter(|n| matches!(n, Node::Send { .. })).count()
    }
}

//! What one rank does in one collective, as a list that means what it says when done from top to bottom.
//!
//! Nothing in here says what may overlap: [`hazards`](super::hazards) derives that from the regions the nodes touch.

/// One of the memories of a call.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Space {
    /// What the caller passed to be read. The output itself when the call is in place.
    Input,
    /// What the caller passed to be written.
    Output,
    /// Memory of the backend's own.
    Scratch,
}

/// A run of elements.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Region {
    /// In which memory.
    pub space: Space,
    /// First element.
    pub start: usize,
    /// One past the last element.
    pub end: usize,
}

impl Region {
    /// Number of elements.
    pub const fn len(&self) -> usize {
        self.end - self.start
    }

    /// Whether there is nothing in it.
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

/// One thing to do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Node {
    /// One message to a rank.
    Send {
        /// Receiver.
        to: usize,
        /// What it holds.
        region: Region,
    },
    /// One message from a rank.
    Receive {
        /// Sender.
        from: usize,
        /// Where it goes.
        region: Region,
    },
    /// `into = source₀ ∘ source₁ ∘ …`, in this order. With one source, a copy.
    Reduce {
        /// The result.
        into: Region,
        /// All as long as `into`.
        sources: Vec<Source>,
        /// Whether all ranks' contributions are in it now, so that an average divides here.
        last: bool,
    },
}

impl Node {
    /// The region that the node's progress is counted in.
    pub fn region(&self) -> Region {
        match self {
            Self::Send { region, .. } | Self::Receive { region, .. } => *region,
            Self::Reduce { into, .. } => *into,
        }
    }
}

/// All that one rank does in one call.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Program {
    /// In order.
    pub nodes: Vec<Node>,
    /// Elements of scratch memory needed.
    pub scratch: usize,
}

impl Program {
    /// Elements this rank sends.
    pub fn elements_sent(&self) -> usize {
        self.nodes.iter().map(|n| if let Node::Send { region, .. } = n { region.len() } else { 0 }).sum()
    }

    /// Elements this rank adds to others.
    pub fn elements_reduced(&self) -> usize {
        let of = |node: &Node| match node {
            Node::Reduce { into, sources, .. } => into.len() * (sources.len() - 1),
            Node::Send { .. } | Node::Receive { .. } => 0,
        };
        self.nodes.iter().map(of).sum()
    }

    /// Messages this rank sends.
    pub fn messages_sent(&self) -> usize {
        self.nodes.iter().filter(|n| matches!(n, Node::Send { .. })).count()
    }
}

//! From a call to functions of NCCL.

use super::Nccl;
use super::combine::{self, Elements, Way, key_type, nccl_type, way};
use crate::buffer::ViewMut;
use crate::call::Call;
use crate::device::symbols::Handle;
use crate::device::{Address, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::operation::{Operation, ReduceOp};

/// A kernel that must come behind NCCL's part of a call.
pub(super) enum Finish {
    Divide(Elements, usize),
    FromKeys(Address, Elements, bool),
}

impl Finish {
    pub(super) fn run(self, device: &Device, stream: &Stream) -> Result<()> {
        match self {
            Self::Divide(elements, ranks) => combine::divide(device, stream, elements, ranks),
            Self::FromKeys(keys, to, smallest) => combine::from_keys(device, stream, keys, to, smallest),
        }
    }
}

/// The addresses of a call: what it reads, and what it writes.
struct Places {
    input: Address,
    output: Address,
}

impl Nccl {
    /// Enqueues NCCL's part of a call, and notes what comes behind it.
    pub(super) fn issue(&mut self, call: &Call<'_>, stream: &Stream) -> Result<()> {
        let Call { signature, in_place, .. } = *call;
        let output = call.output.as_ref().and_then(ViewMut::device).map(|m| m.address);
        let input = call.input.and_then(|v| v.device()).map(|m| m.address);
        // On ranks that have one of the two only, NCCL is given it for both and does not look at the other.
        let places = Places {
            input: input.or(output).unwrap_or_default(),
            output: output.or(input).unwrap_or_default(),
        };
        let (me, chunk) = (self.shared.position, signature.count * signature.dtype.size());
        let at = |base: Address, rank: usize| base + (rank * chunk) as u64;
        let mine = at(places.output, me);
        let (count, kind) = (signature.count, nccl_type(signature.dtype));
        if count == 0 && signature.operation != Operation::Barrier {
            return Ok(());
        }
        match signature.operation {
            Operation::AllReduce(op) => self.reduction(call, op, None, &places, stream),
            Operation::Reduce { op, root } => self.reduction(call, op, Some(root.index()), &places, stream),
            Operation::ReduceScatter(op) => {
                let output = if in_place { mine } else { places.output };
                self.reduction(call, op, None, &Places { output, ..places }, stream)
            }
            Operation::Broadcast { root } => {
                let Places { input, output } = places;
                self.nccl("ncclBroadcast", |t, c| {
                    // SAFETY: views of `count` elements that stay borrowed or owned until the stream is past them.
                    unsafe {
                        (t.ncclBroadcast)(input, output, count, kind, root.0 as i32, c, stream.handle())
                    }
                })
            }
            Operation::AllGather => {
                let input = if in_place { mine } else { places.input };
                self.nccl("ncclAllGather", |t, c| {
                    // SAFETY: as above; the output is as long as all chunks.
                    unsafe { (t.ncclAllGather)(input, places.output, count, kind, c, stream.handle()) }
                })
            }
            Operation::Gather { root } => {
                let input = if in_place { mine } else { places.input };
                self.exchange(call, stream, |peer| {
                    let from_me = (peer == root.index()).then_some(input);
                    (from_me, (me == root.index()).then(|| at(places.output, peer)))
                })
            }
            Operation::Scatter { root } => {
                let output = if in_place { mine } else { places.output };
                self.exchange(call, stream, |peer| {
                    let from_me = (me == root.index()).then(|| at(places.input, peer));
                    (from_me, (peer == root.index()).then_some(output))
                })
            }
            Operation::AllToAll => {
                let mut from = places.input;
                if in_place {
                    let bytes = chunk * self.shared.members.len();
                    from = self.scratch(bytes, stream)?;
                    // SAFETY: the scratch is as long as the call's buffer, and both are used in stream order.
                    unsafe { stream.copy(from, places.output, bytes) }?;
                }
                self.exchange(call, stream, |peer| (Some(at(from, peer)), Some(at(places.output, peer))))
            }
            Operation::Send { to } => self.nccl("ncclSend", |t, c| {
                // SAFETY: as above.
                unsafe { (t.ncclSend)(places.input, count, kind, to.0 as i32, c, stream.handle()) }
            }),
            Operation::Recv { from } => self.nccl("ncclRecv", |t, c| {
                // SAFETY: as above.
                unsafe { (t.ncclRecv)(places.output, count, kind, from.0 as i32, c, stream.handle()) }
            }),
            Operation::Barrier => {
                let token = self.token.address();
                self.nccl("ncclAllReduce", |t, c| {
                    // SAFETY: the token is one i32 that only barriers touch, in stream order.
                    unsafe {
                        (t.ncclAllReduce)(token, token, 1, nccl_type(DType::I32), 0, c, stream.handle())
                    }
                })
            }
        }
    }

    fn reduction(
        &mut self,
        call: &Call<'_>,
        op: ReduceOp,
        root: Option<usize>,
        places: &Places,
        stream: &Stream,
    ) -> Result<()> {
        let (dtype, count) = (call.signature.dtype, call.signature.count);
        let (n, me) = (self.shared.members.len(), self.shared.position);
        let scatter = matches!(call.signature.operation, Operation::ReduceScatter(_));
        let elements = Elements { address: places.output, dtype, count };
        let gets_result = root.is_none_or(|root| root == me);
        let (input, output, as_type, number) = match way(op, dtype, n) {
            Way::Native(number) => (places.input, places.output, dtype, number),
            Way::SumThenDivide => {
                if gets_result {
                    self.finishes.push(Finish::Divide(elements, n));
                }
                (places.input, places.output, dtype, 0)
            }
            Way::Keys(number) => {
                let smallest = op == ReduceOp::Min;
                let whole = if scatter { n * count } else { count };
                let key = key_type(dtype);
                let keys = self.scratch(whole * key.size(), stream)?;
                let from = Elements { address: places.input, dtype, count: whole };
                combine::to_keys(&self.device, stream, from, keys, smallest)?;
                let result = if scatter { keys + (me * count * key.size()) as u64 } else { keys };
                if gets_result {
                    self.finishes.push(Finish::FromKeys(result, elements, smallest));
                }
                (keys, result, key, number)
            }
        };
        let (kind, stream) = (nccl_type(as_type), stream.handle());
        // SAFETY, of all three: the views hold `count` elements, of all chunks where they are read by reduce-scatter; they
        // stay borrowed or owned until the stream is past them, and the scratch until the next call of this group.
        match (root, scatter) {
            (Some(root), _) => self.nccl("ncclReduce", |t, c| {
                // SAFETY: see above.
                unsafe { (t.ncclReduce)(input, output, count, kind, number, root as i32, c, stream) }
            }),
            (None, true) => self.nccl("ncclReduceScatter", |t, c| {
                // SAFETY: see above.
                unsafe { (t.ncclReduceScatter)(input, output, count, kind, number, c, stream) }
            }),
            (None, false) => self.nccl("ncclAllReduce", |t, c| {
                // SAFETY: see above.
                unsafe { (t.ncclAllReduce)(input, output, count, kind, number, c, stream) }
            }),
        }
    }

    /// Chunks between pairs of ranks: for each peer, from where to send and to where to receive.
    fn exchange(
        &mut self,
        call: &Call<'_>,
        stream: &Stream,
        pair: impl Fn(usize) -> (Option<Address>, Option<Address>),
    ) -> Result<()> {
        let (me, n) = (self.shared.position, self.shared.members.len());
        let (count, kind) = (call.signature.count, nccl_type(call.signature.dtype));
        self.nccl("ncclGroupEnd", |t, c| {
            // SAFETY: closed below, on the same thread.
            let mut code = unsafe { (t.ncclGroupStart)() };
            // Everybody starts with another peer, so that not all send to the same at once. A rank's own chunk goes the same
            // way, beside the others, unless it is in its place already.
            for peer in (0..n).map(|distance| (me + distance) % n) {
                let (send, receive) = match pair(peer) {
                    (Some(from), Some(to)) if from == to => (None, None),
                    ends => ends,
                };
                if let (0, Some(from)) = (code, send) {
                    // SAFETY: a chunk of a view of the call.
                    code = unsafe { (t.ncclSend)(from, count, kind, peer as i32, c, stream.handle()) };
                }
                if let (0, Some(to)) = (code, receive) {
                    // SAFETY: a chunk of a view of the call.
                    code = unsafe { (t.ncclRecv)(to, count, kind, peer as i32, c, stream.handle()) };
                }
            }
            // SAFETY: opened above.
            let end = unsafe { (t.ncclGroupEnd)() };
            if code == 0 { end } else { code }
        })
    }

    /// Calls NCCL, which returns when it has taken the call (not when the GPU has done it). The caller has entered.
    fn nccl(&self, name: &'static str, call: impl FnOnce(&crate::device::Nccl, Handle) -> i32) -> Result<()> {
        let shared = &*self.shared;
        let Some(handle) = self.handle else {
            return Err(Error::invalid(format!(
                "group `{}` has one member, and no one to exchange messages with",
                shared.group
            )));
        };
        let code = call(&shared.nccl, handle);
        shared.outcome(name, code, handle).map_err(|error| shared.refused(error))
    }

    fn scratch(&mut self, bytes: usize, stream: &Stream) -> Result<Address> {
        let which = self.which(stream);
        self.scratch[which].take(&self.device, stream, bytes)
    }
}

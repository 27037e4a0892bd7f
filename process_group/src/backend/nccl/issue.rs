//! From a call to functions of NCCL.

use super::Nccl;
use super::combine::{self, Elements, SUM, Way, key_type, nccl_type, way};
use crate::buffer::ViewMut;
use crate::call::Call;
use crate::device::nccl::sys::ncclComm_t;
use crate::device::{Address, Device, Stream};
use crate::dtype::DType;
use crate::error::{Error, Result};
use crate::foreign;
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
                        foreign!(
                            nccl,
                            t.ncclBroadcast(
                                input as _,
                                output as _,
                                count,
                                kind,
                                root.0 as i32,
                                c,
                                stream.handle().cast()
                            )
                        )
                    }
                })
            }
            Operation::AllGather => {
                let input = if in_place { mine } else { places.input };
                self.nccl("ncclAllGather", |t, c| {
                    // SAFETY: as above; the output is as long as all chunks.
                    unsafe {
                        foreign!(
                            nccl,
                            t.ncclAllGather(
                                input as _,
                                places.output as _,
                                count,
                                kind,
                                c,
                                stream.handle().cast()
                            )
                        )
                    }
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
                unsafe {
                    foreign!(
                        nccl,
                        t.ncclSend(places.input as _, count, kind, to.0 as i32, c, stream.handle().cast())
                    )
                }
            }),
            Operation::Recv { from } => self.nccl("ncclRecv", |t, c| {
                // SAFETY: as above.
                unsafe {
                    foreign!(
                        nccl,
                        t.ncclRecv(places.output as _, count, kind, from.0 as i32, c, stream.handle().cast())
                    )
                }
            }),
            Operation::Barrier => {
                let token = self.token.address();
                self.nccl("ncclAllReduce", |t, c| {
                    // SAFETY: the token is one i32 that only barriers touch, in stream order.
                    unsafe {
                        foreign!(
                            nccl,
                            t.ncclAllReduce(
                                token as _,
                                token as _,
                                1,
                                nccl_type(DType::I32),
                                SUM,
                                c,
                                stream.handle().cast()
                            )
                        )
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
                (places.input, places.output, dtype, SUM)
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
        let (kind, stream) = (nccl_type(as_type), stream.handle().cast());
        // SAFETY, of all three: the views hold `count` elements, of all chunks where they are read by reduce-scatter; they
        // stay borrowed or owned until the stream is past them, and the scratch until the next call of this group.
        match (root, scatter) {
            (Some(root), _) => self.nccl("ncclReduce", |t, c| {
                // SAFETY: see above.
                unsafe {
                    foreign!(
                        nccl,
                        t.ncclReduce(input as _, output as _, count, kind, number, root as i32, c, stream)
                    )
                }
            }),
            (None, true) => self.nccl("ncclReduceScatter", |t, c| {
                // SAFETY: see above.
                unsafe {
                    foreign!(
                        nccl,
                        t.ncclReduceScatter(input as _, output as _, count, kind, number, c, stream)
                    )
                }
            }),
            (None, false) => self.nccl("ncclAllReduce", |t, c| {
                // SAFETY: see above.
                unsafe {
                    foreign!(nccl, t.ncclAllReduce(input as _, output as _, count, kind, number, c, stream))
                }
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
            let mut code = unsafe { foreign!(nccl, t.ncclGroupStart()) };
            // Everybody starts with another peer, so that not all send to the same at once. A rank's own chunk goes the same
            // way, beside the others, unless it is in its place already.
            for peer in (0..n).map(|distance| (me + distance) % n) {
                let (send, receive) = match pair(peer) {
                    (Some(from), Some(to)) if from == to => (None, None),
                    ends => ends,
                };
                if let (0, Some(from)) = (code, send) {
                    // SAFETY: a chunk of a view of the call.
                    code = unsafe {
                        foreign!(
                            nccl,
                            t.ncclSend(from as _, count, kind, peer as i32, c, stream.handle().cast())
                        )
                    };
                }
                if let (0, Some(to)) = (code, receive) {
                    // SAFETY: a chunk of a view of the call.
                    code = unsafe {
                        foreign!(
                            nccl,
                            t.ncclRecv(to as _, count, kind, peer as i32, c, stream.handle().cast())
                        )
                    };
                }
            }
            // SAFETY: opened above.
            let end = unsafe { foreign!(nccl, t.ncclGroupEnd()) };
            if code == 0 { end } else { code }
        })
    }

    /// Calls NCCL, which returns when it has taken the call (not when the GPU has done it). The caller has entered.
    fn nccl(
        &self,
        name: &'static str,
        call: impl FnOnce(&crate::device::Nccl, ncclComm_t) -> i32,
    ) -> Result<()> {
        let shared = &*self.shared;
        let Some(handle) = self.handle else {
            return Err(Error::invalid(format!(
                "group `{}` has one member, and no one to exchange messages with",
                shared.group
            )));
        };
        let code = call(&shared.nccl, handle as ncclComm_t);
        shared.outcome(name, code, handle).map_err(|error| shared.refused(error))
    }

    fn scratch(&mut self, bytes: usize, stream: &Stream) -> Result<Address> {
        let which = self.which(stream);
        self.scratch[which].take(&self.device, stream, bytes)
    }
}

//! Translates a call into functions of NCCL.

use std::sync::Arc;
use std::time::Instant;

use super::communicator::NcclComm;
use super::reductions::{self, Elements, PostKernel, key_type, nccl_type};
use crate::backend::call::Call;
use crate::device::buffer::ViewMut;
use crate::device::nccl::sys::ncclComm_t;
use crate::device::symbols::foreign;
use crate::device::{Address, DeviceBuffer, Handle, Nccl, Stream};
use crate::error::{Error, Result};
use crate::paths::Path;
use crate::paths::gpu::{ReductionPlan, nccl_reduction};
use crate::types::dtype::DType;
use crate::types::operation::{Operation, ReduceOp};

/// Enqueues the calls of one group.
pub(crate) struct NcclLauncher {
    comm: Arc<NcclComm>,
    /// The communicator for calls; none in a group of one.
    handle: Option<Handle>,
    /// The buffer that barriers reduce.
    token: DeviceBuffer,
    /// True while a group of calls is open.
    pub(in crate::gpu) is_grouped: bool,
    /// Kernels of calls of the open group, which follow NCCL's part.
    post: Vec<PostKernel>,
}

/// The addresses of a call: its input and its output.
#[derive(Clone, Copy)]
struct Buffers {
    input: Address,
    output: Address,
}

/// A call on its way to NCCL.
struct Launch<'a, 'b> {
    launcher: &'a NcclLauncher,
    call: &'a Call<'b>,
    stream: &'a Stream,
    workspace: Address,
    buffers: Buffers,
}

impl NcclLauncher {
    /// Creates a launcher for a communicator that has been made.
    ///
    /// # Errors
    /// Those of the GPU's memory.
    pub(super) fn new(comm: &Arc<NcclComm>, handle: Option<Handle>) -> Result<Self> {
        let token = DeviceBuffer::from_slice(&comm.device, &[0i32])?;
        Ok(Self { comm: Arc::clone(comm), handle, token, is_grouped: false, post: Vec::new() })
    }

    /// Interprets NCCL's code. The caller is still inside NCCL, so that the communicator can be queried.
    fn outcome(&self, call: &'static str, code: i32, deadline: Instant) -> Result<()> {
        // With NCCL_COMM_BLOCKING=0 calls do not block, and must be polled.
        self.comm.poll(call, code, self.handle.unwrap_or_default(), deadline)
    }

    /// Returns the bytes of workspace that a call needs in addition to its buffers.
    pub(crate) fn workspace_bytes(&self, call: &Call<'_>) -> usize {
        let (dtype, count) = (call.fingerprint.dtype, call.fingerprint.count);
        let n = self.comm.status.members.all.len();
        let (op, chunks) = match call.fingerprint.operation {
            Operation::AllReduce(op) | Operation::Reduce { op, .. } => (op, 1),
            Operation::ReduceScatter(op) => (op, n),
            Operation::AllToAll if call.in_place => return n * count * dtype.size(),
            _ => return 0,
        };
        match nccl_reduction(op, dtype, n) {
            ReductionPlan::OrderedKeys(_) => chunks * count * key_type(dtype).size(),
            ReductionPlan::Native(_) | ReductionPlan::SumThenDivide => 0,
        }
    }

    /// Enqueues a call, and returns its path.
    ///
    /// # Safety
    /// As [`PeerMemory::launch`](crate::gpu::PeerMemory::launch).
    ///
    /// # Errors
    /// Those of NCCL. The group must be given up then.
    pub(in crate::gpu) unsafe fn launch(
        &mut self,
        call: &Call<'_>,
        stream: &Stream,
        workspace: Address,
    ) -> Result<Path> {
        if call.fingerprint.count == 0 && call.fingerprint.operation != Operation::Barrier {
            return Ok(Path::Nccl);
        }
        let output = call.output.as_ref().and_then(ViewMut::device).map(|m| m.address);
        let input = call.input.and_then(|v| v.device()).map(|m| m.address);
        // On ranks that have only one of the two, NCCL gets it for both and does not use the other.
        let buffers = Buffers {
            input: input.or(output).unwrap_or_default(),
            output: output.or(input).unwrap_or_default(),
        };
        let post = Launch { launcher: self, call, stream, workspace, buffers }.run()?;
        match post {
            Some(post) if self.is_grouped => self.post.push(post),
            Some(post) => post.launch(&self.comm.device, stream)?,
            None => {}
        }
        Ok(Path::Nccl)
    }

    /// Begins a group of calls, which may be combined.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub(crate) fn group_start(&mut self) -> Result<()> {
        // SAFETY: ended by `group_end` on the same thread.
        let code = unsafe { foreign!(nccl, self.comm.nccl.ncclGroupStart()) };
        self.outcome("ncclGroupStart", code, Instant::now())?;
        self.is_grouped = true;
        Ok(())
    }

    /// Enqueues all calls since [`group_start`](Self::group_start). NCCL must accept them by the deadline.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub(crate) fn group_end(&mut self, stream: &Stream, deadline: Instant) -> Result<()> {
        self.is_grouped = false;
        // SAFETY: started by `group_start` on the same thread.
        let code = unsafe { foreign!(nccl, self.comm.nccl.ncclGroupEnd()) };
        let post = std::mem::take(&mut self.post);
        self.outcome("ncclGroupEnd", code, deadline)?;
        post.into_iter().try_for_each(|post| post.launch(&self.comm.device, stream))
    }
}

impl Launch<'_, '_> {
    /// Passes the call to NCCL. Returns the kernel that must follow it, if it needs one.
    #[inline]
    fn run(&self) -> Result<Option<PostKernel>> {
        let Call { fingerprint, in_place, .. } = *self.call;
        let Buffers { input, output } = self.buffers;
        let me = self.position();
        let (count, kind, stream) =
            (fingerprint.count, nccl_type(fingerprint.dtype), self.stream.handle().cast());
        match fingerprint.operation {
            Operation::AllReduce(op) | Operation::Reduce { op, .. } | Operation::ReduceScatter(op) => {
                return self.reduction(op);
            }
            Operation::Broadcast { root } => self.nccl("ncclBroadcast", |t, c| {
                // SAFETY: views of `count` elements that stay until the stream is past them.
                unsafe {
                    foreign!(
                        nccl,
                        t.ncclBroadcast(input as _, output as _, count, kind, root.0 as i32, c, stream)
                    )
                }
            }),
            Operation::AllGather => {
                let input = if in_place { self.chunk(output, me) } else { input };
                self.nccl("ncclAllGather", |t, c| {
                    // SAFETY: as above; the output is as long as all chunks.
                    unsafe {
                        foreign!(nccl, t.ncclAllGather(input as _, output as _, count, kind, c, stream))
                    }
                })
            }
            Operation::Gather { root } => {
                let input = if in_place { self.chunk(output, me) } else { input };
                self.exchange(|peer| {
                    let from_me = (peer == root.index()).then_some(input);
                    (from_me, (me == root.index()).then(|| self.chunk(output, peer)))
                })
            }
            Operation::Scatter { root } => {
                let output = if in_place { self.chunk(output, me) } else { output };
                self.exchange(|peer| {
                    let from_me = (me == root.index()).then(|| self.chunk(input, peer));
                    (from_me, (peer == root.index()).then_some(output))
                })
            }
            Operation::AllToAll => {
                let mut from = input;
                if in_place {
                    from = self.workspace;
                    let bytes = self.members() * count * fingerprint.dtype.size();
                    // SAFETY: the workspace is as long as the call's buffer, and both are used in stream order.
                    unsafe { self.stream.copy(from, output, bytes) }?;
                }
                self.exchange(|peer| (Some(self.chunk(from, peer)), Some(self.chunk(output, peer))))
            }
            Operation::Send { to } => self.nccl("ncclSend", |t, c| {
                // SAFETY: as above.
                unsafe { foreign!(nccl, t.ncclSend(input as _, count, kind, to.0 as i32, c, stream)) }
            }),
            Operation::Recv { from } => self.nccl("ncclRecv", |t, c| {
                // SAFETY: as above.
                unsafe { foreign!(nccl, t.ncclRecv(output as _, count, kind, from.0 as i32, c, stream)) }
            }),
            Operation::Barrier => {
                let token = self.launcher.token.address();
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
                                reductions::SUM,
                                c,
                                stream
                            )
                        )
                    }
                })
            }
        }?;
        Ok(None)
    }

    /// Reduces over all ranks: to all of them, to one, or to each rank its chunk.
    #[inline]
    fn reduction(&self, op: ReduceOp) -> Result<Option<PostKernel>> {
        let Call { fingerprint, in_place, .. } = *self.call;
        let (dtype, count) = (fingerprint.dtype, fingerprint.count);
        let (n, me) = (self.members(), self.position());
        let scatter = matches!(fingerprint.operation, Operation::ReduceScatter(_));
        let root = match fingerprint.operation {
            Operation::Reduce { root, .. } => Some(root.index()),
            _ => None,
        };
        let output =
            if scatter && in_place { self.chunk(self.buffers.output, me) } else { self.buffers.output };
        let elements = Elements { address: output, dtype, count };
        let gets_result = root.is_none_or(|root| root == me);
        let mut post = None;
        let (input, output, as_type, number) = match nccl_reduction(op, dtype, n) {
            ReductionPlan::Native(op) => (self.buffers.input, output, dtype, reductions::nccl_op(op)),
            ReductionPlan::SumThenDivide => {
                post = Some(PostKernel::Divide(elements, n));
                (self.buffers.input, output, dtype, reductions::SUM)
            }
            ReductionPlan::OrderedKeys(op) => {
                let smallest = op == ReduceOp::Min;
                let whole = if scatter { n * count } else { count };
                let (key, keys) = (key_type(dtype), self.workspace);
                let from = Elements { address: self.buffers.input, dtype, count: whole };
                reductions::to_keys(&self.launcher.comm.device, self.stream, from, keys, smallest)?;
                let result = if scatter { keys + (me * count * key.size()) as u64 } else { keys };
                post = Some(PostKernel::FromKeys(result, elements, smallest));
                (keys, result, key, reductions::nccl_op(op))
            }
        };
        let (kind, stream) = (nccl_type(as_type), self.stream.handle().cast());
        // SAFETY, of all three: the views hold `count` elements, of all chunks where they are read by reduce-scatter; they
        // stay until the stream is past them, and so does the workspace.
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
        }?;
        Ok(post.filter(|_| gets_result))
    }

    /// Exchanges chunks between pairs of ranks: `pair` returns for each peer the address to send from and the address to receive
    /// at.
    fn exchange(&self, pair: impl Fn(usize) -> (Option<Address>, Option<Address>)) -> Result<()> {
        let (me, n) = (self.position(), self.members());
        let (count, kind) = (self.call.fingerprint.count, nccl_type(self.call.fingerprint.dtype));
        let stream = self.stream.handle().cast();
        self.nccl("ncclGroupEnd", |t, c| {
            // SAFETY: ended below, on the same thread.
            let mut code = unsafe { foreign!(nccl, t.ncclGroupStart()) };
            // Every rank starts with a different peer, so that not all send to the same one at once. A rank's own chunk is handled
            // like the others, unless it is already in its place.
            for peer in (0..n).map(|distance| (me + distance) % n) {
                let (send, receive) = match pair(peer) {
                    (Some(from), Some(to)) if from == to => (None, None),
                    ends => ends,
                };
                if let (0, Some(from)) = (code, send) {
                    // SAFETY: a chunk of a view of the call.
                    code =
                        unsafe { foreign!(nccl, t.ncclSend(from as _, count, kind, peer as i32, c, stream)) };
                }
                if let (0, Some(to)) = (code, receive) {
                    // SAFETY: a chunk of a view of the call.
                    code =
                        unsafe { foreign!(nccl, t.ncclRecv(to as _, count, kind, peer as i32, c, stream)) };
                }
            }
            // SAFETY: started above.
            let end = unsafe { foreign!(nccl, t.ncclGroupEnd()) };
            if code == 0 { end } else { code }
        })
    }

    /// Calls NCCL, which returns when it has accepted the call (not when the GPU has finished it).
    #[inline]
    fn nccl(&self, name: &'static str, call: impl FnOnce(&Nccl, ncclComm_t) -> i32) -> Result<()> {
        let Some(handle) = self.launcher.handle else {
            return Err(Error::invalid(format!(
                "group `{}` has one member, and no one to exchange messages with",
                self.launcher.comm.status.members.group
            )));
        };
        let code = call(&self.launcher.comm.nccl, handle as ncclComm_t);
        self.launcher.outcome(name, code, self.call.deadline)
    }

    fn members(&self) -> usize {
        self.launcher.comm.status.members.all.len()
    }

    fn position(&self) -> usize {
        self.launcher.comm.status.members.position
    }

    /// Returns the address of the chunk of a rank.
    fn chunk(&self, base: Address, rank: usize) -> Address {
        base + (rank * self.call.fingerprint.count * self.call.fingerprint.dtype.size()) as u64
    }
}

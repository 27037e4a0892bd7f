// Collectives through the memory of peers: see vectors.cu.

// A kernel has two bodies: for whole, aligned vectors, and for all others. `fit` blocks fit a multiprocessor. The host launches
// half of them: a kernel of another group finds room next to this one.
#define KERNEL(name, fit)                                                                                       \
    extern "C" __global__ void __launch_bounds__(256, fit) name(const __grid_constant__ Call call) {            \
        Start s = start(call);                                                                                  \
        const bool is_whole = s.aligned && s.count % PER == 0 && call.pitch % PER == 0;                         \
        if (__builtin_expect(is_whole, 1)) name##_of<true>(call, s); else name##_of<false>(call, s);            \
        launch_next();                                                                                          \
    }

// Number of vectors by which a thread with several sends ahead of its receives, so that the links carry data all the time.
#define DEPTH 2
// Slots of chunks: [scattered, gathered][phase][source].
#define SCATTERED (s.phase() * RANKS * call.capacity)
#define GATHERED ((2 + s.phase()) * RANKS * call.capacity)

// Every rank sends everything to every other. Slots: [phase][source].
template <bool WHOLE> __device__ __forceinline__ void one_shot_of(const Call& call, Start& s) {
    Words own;
    if (s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, s.aligned);
    s.stop_if_given_up();
    const u64 base = s.phase() * RANKS * call.capacity;
    for (u32 v = s.first; v < s.vectors; v += s.stride) {
        if (v != s.first) own = load<WHOLE>(call.in, s.count, v, s.aligned);
        own = to_push(own);
        push_to_all(call, base + (u64)v * 16, own);
    }
    next_phase(call);
    const bool is_one_each = s.vectors <= s.stride;
    for (u32 v = s.first; v < s.vectors; v += s.stride) {
        if (!is_one_each) own = to_push(load<WHOLE>(call.in, s.count, v, s.aligned));
        store<WHOLE>(call.out, s.count, v, reduce(call, call.slots[RANK] + base + (u64)v * 16, own), s.aligned);
    }
}
KERNEL(one_shot, RANKS == 2 ? 8 : 4)

// The vectors of an array are distributed by warps, so that in each block some warps send while others add: 32 for the first owner,
// 32 for the next. Each owner's vectors are consecutive in its slots.
template <u32 OWNERS> struct Share {
    u32 owner;
    u64 at;
    __device__ __forceinline__ explicit Share(u32 v) : owner(v / 32 % OWNERS), at((u64)(v / (32 * OWNERS) * 32 + v % 32) * 16) {}
};

// Each vector is sent to its owner, which adds and sends the sum to all: a reduce-scatter and an all-gather in one kernel.
template <bool WHOLE> __device__ __forceinline__ void two_shot_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride, ahead = steps > 1 ? DEPTH : 0;
    Words own;
    if (s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, s.aligned);
    s.stop_if_given_up();
    for (u32 step = 0; step < steps + ahead; step++) {
        u32 v = step * s.stride + s.first;
        const Share<RANKS> share(v);
        if (v < s.vectors) {
            if (step > 0) own = load<WHOLE>(call.in, s.count, v, s.aligned);
            own = to_push(own);
            if (share.owner != RANK) push(call.slots[share.owner] + SCATTERED + RANK * call.capacity + share.at, own);
        }
        if (step == 0) next_phase(call);
        if (v < s.vectors && share.owner == RANK) {
            const Words sum = to_push(reduce(call, call.slots[RANK] + SCATTERED + share.at, own));
            push_to_all(call, GATHERED + share.at, sum);
            store<WHOLE>(call.out, s.count, v, sum, s.aligned);
        }
        v = (step - ahead) * s.stride + s.first;
        if (step >= ahead && v < s.vectors) {
            const Share<RANKS> share(v);
            if (share.owner == RANK) continue;
            const Words sum = receive(call, call.slots[RANK] + GATHERED + share.owner * call.capacity + share.at);
            store<WHOLE>(call.out, s.count, v, sum, s.aligned);
        }
    }
}
KERNEL(two_shot, RANKS <= 4 ? 8 : 4)

// `in`: a chunk for each rank. `out`: the sum of all ranks' chunks for this rank.
template <bool WHOLE> __device__ __forceinline__ void reduce_scatter_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride, ahead = steps > 1 ? DEPTH : 0;
    const bool aligned = s.aligned && call.pitch % PER == 0;
    s.stop_if_given_up();
    for (u32 step = 0; step < steps + ahead; step++) {
        u32 v = step * s.stride + s.first;
        if (v < s.vectors) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                const Words x = to_push(load<WHOLE>(call.in + peer * call.pitch, s.count, v, aligned));
                push(call.slots[peer] + SCATTERED + RANK * call.capacity + (u64)v * 16, x);
            }
        }
        if (step == 0) next_phase(call);
        v = (step - ahead) * s.stride + s.first;
        if (step >= ahead && v < s.vectors) {
            const Words own = to_push(load<WHOLE>(call.in + RANK * call.pitch, s.count, v, aligned));
            store<WHOLE>(call.out, s.count, v, reduce(call, call.slots[RANK] + SCATTERED + (u64)v * 16, own), aligned);
        }
    }
}
KERNEL(reduce_scatter, RANKS == 2 ? 8 : 4)

// `in`: this rank's chunk. `out`: the chunks of all ranks.
template <bool WHOLE> __device__ __forceinline__ void all_gather_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride, ahead = steps > 1 ? DEPTH : 0;
    const bool aligned = s.aligned && call.pitch % PER == 0;
    Words own;
    if (s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, aligned);
    s.stop_if_given_up();
    for (u32 step = 0; step < steps + ahead; step++) {
        u32 v = step * s.stride + s.first;
        if (v < s.vectors) {
            if (step > 0) own = load<WHOLE>(call.in, s.count, v, aligned);
            own = to_push(own);
            push_to_all(call, GATHERED + (u64)v * 16, own);
        }
        if (step == 0) next_phase(call);
        if (v < s.vectors) store<WHOLE>(call.out + RANK * call.pitch, s.count, v, own, aligned);
        v = (step - ahead) * s.stride + s.first;
        if (step >= ahead && v < s.vectors) {
            Words x[RANKS];
            receive_all<true>(call, call.slots[RANK] + GATHERED + (u64)v * 16, x);
#pragma unroll
            for (int r = 0; r < RANKS; r++) if (r != RANK) store<WHOLE>(call.out + r * call.pitch, s.count, v, x[r], aligned);
        }
    }
}
KERNEL(all_gather, RANKS == 2 ? 8 : 4)

// In a broadcast not every rank has data for every other, but each must receive from all: a rank without data sends an empty
// vector, into slots of this kernel's phase that its data do not use.
__device__ __forceinline__ bool has_token(const Start& s) {
    return s.vectors > 0 && blockIdx.x == 0 && threadIdx.x < RANKS && threadIdx.x != RANK;
}
__device__ __forceinline__ void push_token(const Call& call, const Start& s, u64 at) {
    const Words nothing = {};
    if (has_token(s)) push(call.slots[threadIdx.x] + at + RANK * 16, nothing);
}
__device__ __forceinline__ void receive_token(const Call& call, const Start& s, u64 at) {
    if (has_token(s)) receive(call, call.slots[RANK] + at + threadIdx.x * 16);
}

// The root sends everything to every other rank. Its data use the slots of all sources.
template <bool WHOLE> __device__ __forceinline__ void broadcast_of(const Call& call, Start& s) {
    Words own;
    const bool is_root = call.root == RANK;
    if (is_root && s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, s.aligned);
    s.stop_if_given_up();
    push_token(call, s, SCATTERED);
    for (u32 v = s.first; is_root && v < s.vectors; v += s.stride) {
        if (v != s.first) own = load<WHOLE>(call.in, s.count, v, s.aligned);
        own = to_push(own);
#pragma unroll
        for (int d = 1; d < RANKS; d++) push(call.slots[(RANK + d) % RANKS] + GATHERED + (u64)v * 16, own);
        if (call.in != call.out) store<WHOLE>(call.out, s.count, v, own, s.aligned);
    }
    next_phase(call);
    for (u32 v = s.first; !is_root && v < s.vectors; v += s.stride)
        store<WHOLE>(call.out, s.count, v, receive(call, call.slots[RANK] + GATHERED + (u64)v * 16), s.aligned);
    receive_token(call, s, SCATTERED);
}
KERNEL(broadcast, RANKS <= 4 ? 8 : 4)

// The root sends each vector to its owner, one of the other ranks, which sends it to all but the root.
template <bool WHOLE> __device__ __forceinline__ void scatter_gather_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride, ahead = steps > 1 ? DEPTH : 0;
    const bool is_root = call.root == RANK;
    const auto owner_of = [&](const Share<RANKS - 1>& share) { return (call.root + 1 + share.owner) % RANKS; };
    Words own;
    if (is_root && s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, s.aligned);
    s.stop_if_given_up();
    // Nothing is gathered from the root.
    const u64 tokens = GATHERED + call.root * call.capacity;
    push_token(call, s, tokens);
    for (u32 step = 0; step < steps + ahead; step++) {
        u32 v = step * s.stride + s.first;
        if (is_root && v < s.vectors) {
            const Share<RANKS - 1> share(v);
            if (step > 0) own = load<WHOLE>(call.in, s.count, v, s.aligned);
            own = to_push(own);
            push(call.slots[owner_of(share)] + SCATTERED + RANK * call.capacity + share.at, own);
            if (call.in != call.out) store<WHOLE>(call.out, s.count, v, own, s.aligned);
        }
        if (step == 0) next_phase(call);
        if (is_root) continue;
        if (v < s.vectors) {
            const Share<RANKS - 1> share(v);
            if (owner_of(share) == RANK) {
                const Words x = receive(call, call.slots[RANK] + SCATTERED + call.root * call.capacity + share.at);
#pragma unroll
                for (int d = 1; d < RANKS; d++) {
                    const u32 peer = (RANK + d) % RANKS;
                    if (peer != call.root) push(call.slots[peer] + GATHERED + RANK * call.capacity + share.at, x);
                }
                store<WHOLE>(call.out, s.count, v, x, s.aligned);
            }
        }
        v = (step - ahead) * s.stride + s.first;
        if (step >= ahead && v < s.vectors) {
            const Share<RANKS - 1> share(v);
            const u32 owner = owner_of(share);
            if (owner != RANK)
                store<WHOLE>(call.out, s.count, v, receive(call, call.slots[RANK] + GATHERED + owner * call.capacity + share.at), s.aligned);
        }
    }
    receive_token(call, s, tokens);
}
KERNEL(scatter_gather, RANKS <= 4 ? 8 : 4)

// Collectives through the memory of peers: see vectors.cu.

// Half of the blocks that fit a multiprocessor are launched: a launch of another group finds room beside them.
#define RESIDENT __launch_bounds__(512, RANKS == 2 ? 4 : 2)
// A kernel has two bodies: for whole, aligned vectors, and for all others.
#define KERNEL(name, is_short)                                                                           \
    extern "C" __global__ void RESIDENT name(const Call call) {                                   \
        Start s = start<is_short>(call);                                                          \
        const bool is_whole = s.aligned && s.count % PER == 0 && call.pitch % PER == 0;           \
        if (__builtin_expect(is_whole, 1)) name##_of<true>(call, s); else name##_of<false>(call, s); \
        end(call);                                                                                \
    }

// Everybody sends everything to everybody. Slots: [phase][source].
template <bool WHOLE> __device__ __forceinline__ void one_shot_of(const Call& call, Start& s) {
    Words own;
    if (s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, s.aligned);
    s.look();
    const u64 base = s.phase() * RANKS * call.capacity;
    for (u32 v = s.first; v < s.vectors; v += s.stride) {
        if (v != s.first) own = load<WHOLE>(call.in, s.count, v, s.aligned);
        own = to_push(own);
        push_to_all(call, base + (u64)v * 16, own);
    }
    const bool is_one_each = s.vectors <= s.stride;
    for (u32 v = s.first; v < s.vectors; v += s.stride) {
        if (!is_one_each) own = to_push(load<WHOLE>(call.in, s.count, v, s.aligned));
        store<WHOLE>(call.out, s.count, v, reduce<true>(call, call.slots[RANK] + base + (u64)v * 16, own), s.aligned);
    }
}
KERNEL(one_shot, true)

// The kernels in two steps: reduce-scatter and all-gather. Each thread is DEPTH vectors ahead with what it sends of what it
// receives, so that the links carry data all the time. Slots: [scattered, gathered][phase][source].
#define DEPTH 2
#define SCATTERED (s.phase() * RANKS * call.capacity)
#define GATHERED ((2 + s.phase()) * RANKS * call.capacity)

template <bool WHOLE> __device__ __forceinline__ void two_shot_of(const Call& call, Start& s) {
    const u32 chunk = (s.vectors + RANKS - 1) / RANKS, steps = (chunk + s.stride - 1) / s.stride;
    s.look();
    for (u32 step = 0; step < steps + 2 * DEPTH; step++) {
        u32 v = step * s.stride + s.first;
        if (step < steps && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                if (peer * chunk + v >= s.vectors) continue;
                const Words x = to_push(load<WHOLE>(call.in, s.count, peer * chunk + v, s.aligned));
                push(call.slots[peer] + SCATTERED + RANK * call.capacity + (u64)v * 16, x);
            }
        }
        v = (step - DEPTH) * s.stride + s.first;
        if (step >= DEPTH && step < steps + DEPTH && v < chunk && RANK * chunk + v < s.vectors) {
            const Words own = to_push(load<WHOLE>(call.in, s.count, RANK * chunk + v, s.aligned));
            const Words sum = to_push(reduce<true>(call, call.slots[RANK] + SCATTERED + (u64)v * 16, own));
            push_to_all(call, GATHERED + (u64)v * 16, sum);
            store<WHOLE>(call.out, s.count, RANK * chunk + v, sum, s.aligned);
        }
        v = (step - 2 * DEPTH) * s.stride + s.first;
        if (step >= 2 * DEPTH && v < chunk) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                if (peer * chunk + v >= s.vectors) continue;
                const Words x = receive(call, call.slots[RANK] + GATHERED + peer * call.capacity + (u64)v * 16);
                store<WHOLE>(call.out, s.count, peer * chunk + v, x, s.aligned);
            }
        }
    }
}
KERNEL(two_shot, false)

// `in`: a chunk for each rank. `out`: the sum of everybody's chunk for this rank.
template <bool WHOLE> __device__ __forceinline__ void reduce_scatter_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride;
    const bool aligned = s.aligned && call.pitch % PER == 0;
    s.look();
    for (u32 step = 0; step < steps + DEPTH; step++) {
        u32 v = step * s.stride + s.first;
        if (step < steps && v < s.vectors) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                const Words x = to_push(load<WHOLE>(call.in + peer * call.pitch, s.count, v, aligned));
                push(call.slots[peer] + SCATTERED + RANK * call.capacity + (u64)v * 16, x);
            }
        }
        v = (step - DEPTH) * s.stride + s.first;
        if (step >= DEPTH && v < s.vectors) {
            const Words own = to_push(load<WHOLE>(call.in + RANK * call.pitch, s.count, v, aligned));
            store<WHOLE>(call.out, s.count, v, reduce<true>(call, call.slots[RANK] + SCATTERED + (u64)v * 16, own), aligned);
        }
    }
}
KERNEL(reduce_scatter, false)

// `in`: this rank's chunk. `out`: those of all ranks.
template <bool WHOLE> __device__ __forceinline__ void all_gather_of(const Call& call, Start& s) {
    const u32 steps = (s.vectors + s.stride - 1) / s.stride;
    const bool aligned = s.aligned && call.pitch % PER == 0;
    Words own;
    if (s.first < s.vectors) own = load<WHOLE>(call.in, s.count, s.first, aligned);
    s.look();
    for (u32 step = 0; step < steps + DEPTH; step++) {
        u32 v = step * s.stride + s.first;
        if (step < steps && v < s.vectors) {
            if (step > 0) own = load<WHOLE>(call.in, s.count, v, aligned);
            own = to_push(own);
            push_to_all(call, GATHERED + (u64)v * 16, own);
            store<WHOLE>(call.out + RANK * call.pitch, s.count, v, own, aligned);
        }
        v = (step - DEPTH) * s.stride + s.first;
        if (step >= DEPTH && v < s.vectors) {
#pragma unroll
            for (int d = 1; d < RANKS; d++) {
                const int peer = (RANK + d) % RANKS;
                const Words x = receive(call, call.slots[RANK] + GATHERED + peer * call.capacity + (u64)v * 16);
                store<WHOLE>(call.out + peer * call.pitch, s.count, v, x, aligned);
            }
        }
    }
}
KERNEL(all_gather, false)

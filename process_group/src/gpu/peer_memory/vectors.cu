// Moves and adds vectors through memory that all ranks of a node can access. Precedes each kernel file. Compiled with KIND, the
// number of the element type (0 f32, 2 f16, 3 bf16), RANKS, the size of the group (2 to 8), and RANK, this rank's place in it.
// Includes nothing.
//
// Every rank has slots in its memory, one for each source. A rank pushes vectors of 16 bytes into the slots of its peers and
// polls its own. The data are the flag: a slot is *armed* with words that no rank ever pushes, and a vector has arrived when
// none of its four words is such a word. So no barrier and no fence is needed, and a torn store cannot be taken for a whole one.
// The reader arms the slot again.
//
// Slots have two phases, which calls use in turn. A peer pushes into the same phase again two calls later. By then it has received
// data of the call in between, which depend on the data that this rank pushed there, and this rank pushed those after the kernel
// that armed the phase again. So two phases are enough, as long as every rank receives data from every other in each call, directly
// or through a third.
//
// Sums are in f32 and rounded once; neighbours are added in pairs while their number is even, then one after the other. All ranks get the
// same bits, from every kernel.
//
// After the Lamport-style kernels of TensorRT-LLM and SGLang.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

// A NaN. Data that contain it get another NaN instead.
#define ARMED 0xffffffffu
#define NOT_ARMED 0xfffeffffu

// Bits of a state.
#define PHASE 1u
#define GIVEN_UP 2u

#if KIND == 0
typedef u32 T;
#define PER 4
#else
typedef u16 T;
#define PER 8
#endif

struct Words { u32 w[4]; };
struct Sums { float f[PER]; };

// The parameters from the host.
struct Call {
    const T* in;
    T* out;
    // Number of elements: of the array, or of the chunk of each rank.
    u64 count;
    // Number of elements from one rank's chunk to the next, for operations with chunks.
    u64 pitch;
    // Addresses of the slots of each rank on this GPU.
    u64 slots[RANKS];
    // Bytes of one slot.
    u64 capacity;
    // A word for each block that a launch may have: the phase of the next call, and whether a call has been given up. All are
    // equal.
    u32* states;
    u32 blocks;
    // The rank that broadcasts.
    u32 root;
    // The states of all kernels of the group: two words for each block.
    u32* all_states;
    // 1: give up. The host writes it, or a wait that has lasted for `patience` nanoseconds.
    u32* abort;
    u64 patience;
};

#if KIND == 2
__device__ __forceinline__ float widen(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ __forceinline__ float low(u32 w) { return widen((u16)w); }
__device__ __forceinline__ float high(u32 w) { return widen((u16)(w >> 16)); }
__device__ __forceinline__ u32 pack(float x, float y) { u32 w; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x)); return w; }
#elif KIND == 3
__device__ __forceinline__ float low(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float high(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 pack(float x, float y) { u32 w; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(w) : "f"(y), "f"(x)); return w; }
#endif

__device__ __forceinline__ Sums widen(const Words& x) {
    Sums s;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        s.f[i] = __uint_as_float(x.w[i]);
#else
        s.f[2 * i] = low(x.w[i]);
        s.f[2 * i + 1] = high(x.w[i]);
#endif
    }
    return s;
}

__device__ __forceinline__ Sums operator+(Sums s, const Sums& x) {
#pragma unroll
    for (int i = 0; i < PER; i++) s.f[i] += x.f[i];
    return s;
}

__device__ __forceinline__ Words round_once(const Sums& s) {
    Words x;
#pragma unroll
    for (int i = 0; i < 4; i++) {
#if KIND == 0
        x.w[i] = __float_as_uint(s.f[i]);
#else
        x.w[i] = pack(s.f[2 * i], s.f[2 * i + 1]);
#endif
    }
    return x;
}

__device__ __forceinline__ Words to_push(Words x) {
#pragma unroll
    for (int i = 0; i < 4; i++) if (x.w[i] == ARMED) x.w[i] = NOT_ARMED;
    return x;
}

__device__ __forceinline__ bool is_there(const Words& x) {
    return x.w[0] != ARMED && x.w[1] != ARMED && x.w[2] != ARMED && x.w[3] != ARMED;
}

__device__ __forceinline__ Words poll(u64 at) {
    Words x;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
    return x;
}

__device__ __forceinline__ void push(u64 at, const Words& x) {
    asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
}

__device__ __forceinline__ void arm(u64 at) {
    asm volatile("st.global.v4.u32 [%0], {%1,%1,%1,%1};" :: "l"(at), "r"(ARMED) : "memory");
}

// Returns vector v of `count` elements; those past the end are zero. WHOLE: all vectors are whole, and aligned.
template <bool WHOLE> __device__ __forceinline__ Words load(const T* from, u32 count, u32 v, bool aligned) {
    Words x;
    if (WHOLE || (aligned && (v + 1) * PER <= count)) {
        const T* at = from + v * PER;
        asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(at) : "memory");
        return x;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x.w[i] = 0;
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            const u32 at = v * PER + i * (PER / 4) + j;
            if (at < count) x.w[i] |= (u32)((volatile const T*)from)[at] << (16 * j);
        }
    }
    return x;
}

template <bool WHOLE> __device__ __forceinline__ void store(T* to, u32 count, u32 v, const Words& x, bool aligned) {
    if (WHOLE || (aligned && (v + 1) * PER <= count)) {
        T* at = to + v * PER;
        asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(at), "r"(x.w[0]), "r"(x.w[1]), "r"(x.w[2]), "r"(x.w[3]) : "memory");
        return;
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < PER / 4; j++) {
            const u32 at = v * PER + i * (PER / 4) + j;
            if (at < count) to[at] = (T)(x.w[i] >> (16 * j));
        }
}

// Returns true if a wait is given up because it has lasted too long, or the host demands it. Reads the clock and the host's word
// only occasionally. No later call of the group pushes any data then: a peer must not mistake them for a result.
__device__ __forceinline__ bool gives_up(const Call& call, u32& tries, u64& until) {
    if ((++tries & 1023) != 0) return false;
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (until == 0) until = now + call.patience;
    u32 told;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(told) : "l"(call.abort) : "memory");
    if (now < until && !told) return false;
    asm volatile("st.relaxed.sys.global.u32 [%0], 1;" :: "l"(call.abort) : "memory");
    for (u32 i = 0; i < 2 * call.blocks; i++) atomicOr(call.all_states + i, GIVEN_UP);
    return true;
}

// Waits for the vectors of all peers at `at` + source × capacity, and arms the slots again. When it gives up, the thread ends; or,
// if other threads of its cluster wait for it, it returns false.
template <bool ENDS> __device__ __forceinline__ bool receive_all(const Call& call, u64 at, Words (&x)[RANKS]) {
    u32 tries = 0;
    u64 until = 0;
    for (;;) {
        bool all = true;
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) x[r] = poll(at + r * call.capacity);
#pragma unroll
        for (int r = 0; r < RANKS; r++) if (r != RANK) all &= is_there(x[r]);
        if (all) break;
        if (gives_up(call, tries, until)) {
            if (!ENDS) return false;
            asm volatile("exit;");
        }
    }
#pragma unroll
    for (int r = 0; r < RANKS; r++) if (r != RANK) arm(at + r * call.capacity);
    return true;
}

// Returns the sum of COUNT ranks from FIRST on. Trees of TREE ranks are added one after the other.
#define TREE (RANKS & -RANKS)
template <int FIRST, int COUNT> __device__ __forceinline__ Sums tree(const Words (&x)[RANKS], const Words& own) {
    if constexpr (COUNT == 1) {
        return widen(FIRST == RANK ? own : x[FIRST]);
    } else {
        constexpr int LAST = COUNT > TREE ? TREE : COUNT / 2;
        return tree<FIRST, COUNT - LAST>(x, own) + tree<FIRST + COUNT - LAST, LAST>(x, own);
    }
}

// Returns the sum of the peers' vectors and this rank's own.
__device__ __forceinline__ Words sum_of(const Words (&x)[RANKS], const Words& own) {
    return round_once(tree<0, RANKS>(x, own));
}

__device__ __forceinline__ Words reduce(const Call& call, u64 at, const Words& own) {
    Words x[RANKS];
    receive_all<true>(call, at, x);
    return sum_of(x, own);
}

// Waits for one vector of a peer, and arms its slot again. ENDS: as in `receive_all`.
template <bool ENDS = true> __device__ __forceinline__ Words receive(const Call& call, u64 at) {
    u32 tries = 0;
    u64 until = 0;
    Words x;
    for (x = poll(at); !is_there(x); x = poll(at)) {
        if (gives_up(call, tries, until)) {
            if (!ENDS) break;
            asm volatile("exit;");
        }
    }
    arm(at);
    return x;
}

// Pushes a vector into the slots of all peers, at `at` + this rank × capacity.
__device__ __forceinline__ void push_to_all(const Call& call, u64 at, const Words& x) {
#pragma unroll
    for (int d = 1; d < RANKS; d++) push(call.slots[(RANK + d) % RANKS] + at + RANK * call.capacity, x);
}

// The state of a thread at the start.
struct Start {
    // Its first vector, the distance between its vectors, and their number.
    u32 first, stride, vectors, count;
    // The state of its block.
    u32 state;
    bool aligned;
    __device__ __forceinline__ u64 phase() const { return state & PHASE; }
    // From here on the state is known. Loads that were issued before are in flight in the meantime: the compiler would wait for the
    // state first.
    __device__ __forceinline__ bool is_given_up() {
        asm volatile("" : "+r"(state)::"memory");
        return state & GIVEN_UP;
    }
    // Ends the thread if an earlier call was given up.
    __device__ __forceinline__ void stop_if_given_up() {
        if (is_given_up()) asm volatile("exit;");
    }
};

// Begins every kernel. The kernel may be launched before the previous one has ended: it reads nothing before the memory of that
// kernel is complete.
__device__ __forceinline__ Start start(const Call& call) {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    Start s;
    s.state = *(volatile u32*)(call.states + blockIdx.x);
    s.first = blockIdx.x * blockDim.x + threadIdx.x;
    s.stride = gridDim.x * blockDim.x;
    s.count = (u32)call.count;
    s.vectors = (s.count + PER - 1) / PER;
    s.aligned = (((u64)call.in | (u64)call.out) & 15) == 0;
    return s;
}

// Changes the phase in all states, also in those of blocks that this launch lacks; each block changes its own and a part of the
// others. All threads of a block call this once they know the state. Kernels do so while their first vectors are in transit, so
// that the end of a kernel does not wait for it.
__device__ __forceinline__ void next_phase(const Call& call) {
    __syncthreads();
    for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < call.blocks; i += gridDim.x * blockDim.x)
        atomicXor(call.states + i, PHASE);
}

// The next kernel may be launched when a thread of each block has called this, or the block has ended. A thread calls it when it waits
// for no peer any more: then the kernels of all peers run and need no more room. Before that, the next kernel could take the room of one
// that a peer waits for.
__device__ __forceinline__ void launch_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

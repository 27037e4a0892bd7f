// The documented reductions that NCCL lacks: means that are the sum divided at the end, and minima and maxima in which a NaN wins.
// Compiled with KIND, the number of the element type, and SMALLEST, 1 for the minimum. Includes nothing.

typedef unsigned long long u64;
typedef long long i64;
typedef unsigned int u32;
typedef unsigned short u16;

__device__ float f16_to_f32(u16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x)); return y; }
__device__ u16 f32_to_f16(float x) { u16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x)); return y; }
__device__ float bf16_to_f32(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ u16 f32_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// T: as stored. W: as computed. K: an integer whose order is the order of the floats. F, I: K's width.
#if KIND == 0
typedef float T; typedef float W; typedef int K;
__device__ W widen(T x) { return x; }
__device__ T narrow(W x) { return x; }
#elif KIND == 1
typedef double T; typedef double W; typedef i64 K;
__device__ W widen(T x) { return x; }
__device__ T narrow(W x) { return x; }
#elif KIND == 2
typedef u16 T; typedef float W; typedef int K;
__device__ W widen(T x) { return f16_to_f32(x); }
__device__ T narrow(W x) { return f32_to_f16(x); }
#elif KIND == 3
typedef u16 T; typedef float W; typedef int K;
__device__ W widen(T x) { return bf16_to_f32(x); }
__device__ T narrow(W x) { return f32_to_bf16(x); }
#else
#if KIND == 4
typedef signed char T;
#elif KIND == 5
typedef unsigned char T;
#elif KIND == 6
typedef int T;
#elif KIND == 7
typedef u32 T;
#elif KIND == 8
typedef i64 T;
#else
typedef u64 T;
#endif
typedef T W;
__device__ W widen(T x) { return x; }
__device__ T narrow(W x) { return x; }
#endif

#define EACH(i) for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

// Divides each element by the number of ranks; integers towards zero.
extern "C" __global__ void divide(T* x, u64 count, u32 ranks) {
    EACH(i) {
#if KIND >= 4
        // There may be more ranks than the type can represent: then only its smallest values are non-zero afterwards.
        x[i] = sizeof(T) < 8 ? (T)((i64)x[i] / (i64)ranks) : (T)(x[i] / (T)ranks);
#else
        x[i] = narrow(widen(x[i]) / (W)ranks);
#endif
    }
}

#if KIND < 4
__device__ K bits(float x) { return __float_as_int(x); }
__device__ i64 bits(double x) { return __double_as_longlong(x); }
__device__ float value(int k) { return __int_as_float(k); }
__device__ double value(i64 k) { return __longlong_as_double(k); }

#define LOWEST ((K)1 << (sizeof(K) * 8 - 1))
#define HIGHEST ((K)~LOWEST)
#define NAN_KEY (SMALLEST ? LOWEST : HIGHEST)

extern "C" __global__ void to_keys(const T* x, K* keys, u64 count) {
    EACH(i) {
        W w = widen(x[i]);
        K k = bits(w);
        keys[i] = w != w ? NAN_KEY : (k >= 0 ? k : (K)(k ^ HIGHEST));
    }
}

extern "C" __global__ void from_keys(const K* keys, T* x, u64 count) {
    EACH(i) {
        K k = keys[i];
        // The bits of a NaN: all of the exponent and the first of the fraction.
        x[i] = k == NAN_KEY ? narrow(value((K)(sizeof(K) == 4 ? 0x7fc00000ll : 0x7ff8000000000000ll)))
                            : narrow(value(k >= 0 ? k : (K)(k ^ HIGHEST)));
    }
}
#endif

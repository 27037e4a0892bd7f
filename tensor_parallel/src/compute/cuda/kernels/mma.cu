// Instructions of the kernels on tensor cores.

#if defined(MMA) || defined(WGMMA)

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

// Two numbers, each rounded to 16 bits.
__device__ __forceinline__ u32 rounded_pair(float low, float high) {
    u32 both;
    asm("cvt.rn." TEXT(ELEMENT) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// c[16, 8] += a[16, 16] · b[16, 8], where c is tile n of `tiles`. Each warp's lanes hold their parts.
template <int COUNT> __device__ __forceinline__ void multiply(float (&tiles)[COUNT], int n, const u32 (&a)[4], u32 b0, u32 b1) {
    float* c = tiles + 4 * n;
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TEXT(ELEMENT) "." TEXT(ELEMENT) ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

#endif

// Products of a warp group on the tensor cores of Hopper, for 16-bit types: 64 rows by WGMMA_N columns, sums in f32. Operands lie in
// shared memory in columns of 64 elements: rows of 128 bytes, whose eight parts of 16 bytes are swizzled by the row. Compiled behind
// mma.cu, whose names it uses.

#ifdef WGMMA

#define SUMS4(x, i) "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3])
#define SUMS8(x, i) SUMS4(x, i), SUMS4(x, i + 4)
#define SUMS16(x, i) SUMS8(x, i), SUMS8(x, i + 8)
#define SUMS32(x, i) SUMS16(x, i), SUMS16(x, i + 16)
#define TEXT4 "%0, %1, %2, %3"
#define TEXT8 TEXT4 ", %4, %5, %6, %7"
#define TEXT16 TEXT8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TEXT32 TEXT16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TEXT64 TEXT32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#if WGMMA_N == 16
#define SUMS(x) SUMS8(x, 0)
#define SUMS_TEXT TEXT8
#define OPERANDS_TEXT "%8, %9"
#define ACCUMULATES_TEXT "%10"
#elif WGMMA_N == 32
#define SUMS(x) SUMS16(x, 0)
#define SUMS_TEXT TEXT16
#define OPERANDS_TEXT "%16, %17"
#define ACCUMULATES_TEXT "%18"
#elif WGMMA_N == 64
#define SUMS(x) SUMS32(x, 0)
#define SUMS_TEXT TEXT32
#define OPERANDS_TEXT "%32, %33"
#define ACCUMULATES_TEXT "%34"
#define REGISTERS_TEXT "{%32, %33, %34, %35}, %36, %37, 1, 1, 1;"
#elif WGMMA_N == 128
#define SUMS(x) SUMS32(x, 0), SUMS32(x, 32)
#define SUMS_TEXT TEXT64
#define OPERANDS_TEXT "%64, %65"
#define ACCUMULATES_TEXT "%66"
#define REGISTERS_TEXT "{%64, %65, %66, %67}, %68, %69, 1, 1, 1;"
#else
#error "WGMMA_N is 16, 32, 64 or 128"
#endif
#define MULTIPLY "wgmma.mma_async.sync.aligned.m64n" TEXT(WGMMA_N) "k16.f32." TEXT(ELEMENT) "." TEXT(ELEMENT) " {" SUMS_TEXT "}, "

typedef float Tile[WGMMA_N / 2];

// c[64, WGMMA_N] = a[64, 16] · b[WGMMA_N, 16]ᵀ, both in shared memory; added to c if `accumulates`.
__device__ __forceinline__ void multiply_rows(Tile& c, u64 a, u64 b, int accumulates) {
    asm volatile("{.reg .pred p; setp.ne.b32 p, " ACCUMULATES_TEXT ", 0; " MULTIPLY OPERANDS_TEXT ", p, 1, 1, 0, 0;}"
        : SUMS(c) : "l"(a), "l"(b), "r"(accumulates));
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until c is complete: for all products but those of the latest group, or for all.
__device__ __forceinline__ void wait_for_all_but_one(Tile& c) { asm volatile("wgmma.wait_group.sync.aligned 1;" : SUMS(c) :: "memory"); }
__device__ __forceinline__ void wait_for_all(Tile& c) { asm volatile("wgmma.wait_group.sync.aligned 0;" : SUMS(c) :: "memory"); }

// An operand in shared memory: its address, the distance of its columns (where these lie along the sums), that of each eight rows.
__device__ __forceinline__ u64 operand(u32 address, u32 column_bytes) {
    return (u64)(address >> 4) | (u64)(column_bytes >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}

#endif

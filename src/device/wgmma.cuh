// Tensor cores through wgmma (sm_90a): products that a warpgroup, four neighbouring warps of which
// the first one's number is a multiple of 4, asks for together, and that run beside it.
//
// A is 64 x 16, in shared memory or in registers; B is 16 x (32 to 128), in shared memory; the
// sums are in registers, 16 rows a warp, in the fragments of device/mma.cuh: d[n] are the columns
// from 8 n on. In shared memory matrices are panels of 64 columns, each a TileLayout<T, 64> whose
// tile begins at a multiple of 1024 bytes.
//
// Between product_fence() and the end of product_wait() nothing but a product may touch the
// registers of sums and of A: the compiler does not know.
#pragma once

#include "device/float.cuh"

namespace pullback::device {

// How products find their parts of a matrix: 8 rows are 1024 bytes, permuted by 128; of a
// transposed one 64 further columns are `panel_bytes` further on.
struct MatrixAddress {
  uint32_t low, high;

  explicit MatrixAddress(uint32_t address, uint32_t panel_bytes = 16)
      : low(address >> 4 | panel_bytes >> 4 << 16), high(1u << 30 | 1024 >> 4) {}
  // So many bytes further on: an addition, as shared memory ends before its 14 bits do.
  uint64_t at(uint32_t bytes) const {
    return static_cast<uint64_t>(high) << 32 | (low + (bytes >> 4));
  }
};

// Instructions name each of their registers, hence macros.
#define PULLBACK_SUMS_4(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define PULLBACK_SUMS_OF(d, n)                                                 \
  PULLBACK_SUMS_4(d, n), PULLBACK_SUMS_4(d, n + 1), PULLBACK_SUMS_4(d, n + 2), \
      PULLBACK_SUMS_4(d, n + 3)
#define PULLBACK_SUMS_16(d) PULLBACK_SUMS_OF(d, 0)
#define PULLBACK_SUMS_32(d) PULLBACK_SUMS_OF(d, 0), PULLBACK_SUMS_OF(d, 4)
#define PULLBACK_SUMS_48(d) PULLBACK_SUMS_32(d), PULLBACK_SUMS_OF(d, 8)
#define PULLBACK_SUMS_64(d) PULLBACK_SUMS_32(d), PULLBACK_SUMS_OF(d, 8), PULLBACK_SUMS_OF(d, 12)
#define PULLBACK_LIST_16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define PULLBACK_LIST_32                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}"
#define PULLBACK_LIST_48                                                                        \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
  "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, "  \
  "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define PULLBACK_LIST_64                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "     \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, " \
  "%35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, " \
  "%52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define PULLBACK_PRODUCT(columns, type, predicate, rest) \
  "{\n.reg .pred adds;\nsetp.ne.b32 adds, " predicate    \
  ", 0;\n"                                               \
  "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " " rest ";\n}"

#define PULLBACK_IN_SHARED(function, T, type, columns, sums, list, a, b, adds, transposed)        \
  template <>                                                                                     \
  inline void function<T>(float(&d)[columns / 8][4], uint64_t a_at, uint64_t b_at, int adds_to) { \
    asm volatile(                                                                                 \
        PULLBACK_PRODUCT(#columns, type, adds, list ", " a ", " b ", adds, 1, 1, " transposed)    \
        : sums(d)                                                                                 \
        : "l"(a_at), "l"(b_at), "r"(adds_to));                                                    \
  }
#define PULLBACK_SHARED(T, type, columns, sums, list, a, b, adds) \
  PULLBACK_IN_SHARED(product_of_shared, T, type, columns, sums, list, a, b, adds, "0, 0")
#define PULLBACK_ROWS(T, type, columns, sums, list, a, b, adds) \
  PULLBACK_IN_SHARED(product_of_rows, T, type, columns, sums, list, a, b, adds, "0, 1")
#define PULLBACK_TRANSPOSED(T, type, columns, sums, list, a, b, adds) \
  PULLBACK_IN_SHARED(product_of_transposed, T, type, columns, sums, list, a, b, adds, "1, 1")
#define PULLBACK_REGISTERS(T, type, columns, sums, list, a, b, adds)                              \
  template <>                                                                                     \
  inline void product_of_registers<T>(float(&d)[columns / 8][4], const uint32_t(&a_words)[4],     \
                                      uint64_t b_at) {                                            \
    asm volatile(PULLBACK_PRODUCT(#columns, type, adds, list ", " a ", " b ", adds, 1, 1, 1")     \
                 : sums(d)                                                                        \
                 : "r"(a_words[0]), "r"(a_words[1]), "r"(a_words[2]), "r"(a_words[3]), "l"(b_at), \
                   "r"(1));                                                                       \
  }
#define PULLBACK_PRODUCTS(T, type)                                                             \
  PULLBACK_SHARED(T, type, 32, PULLBACK_SUMS_16, PULLBACK_LIST_16, "%16", "%17", "%18")        \
  PULLBACK_SHARED(T, type, 64, PULLBACK_SUMS_32, PULLBACK_LIST_32, "%32", "%33", "%34")        \
  PULLBACK_SHARED(T, type, 96, PULLBACK_SUMS_48, PULLBACK_LIST_48, "%48", "%49", "%50")        \
  PULLBACK_SHARED(T, type, 128, PULLBACK_SUMS_64, PULLBACK_LIST_64, "%64", "%65", "%66")       \
  PULLBACK_ROWS(T, type, 64, PULLBACK_SUMS_32, PULLBACK_LIST_32, "%32", "%33", "%34")          \
  PULLBACK_ROWS(T, type, 128, PULLBACK_SUMS_64, PULLBACK_LIST_64, "%64", "%65", "%66")         \
  PULLBACK_TRANSPOSED(T, type, 32, PULLBACK_SUMS_16, PULLBACK_LIST_16, "%16", "%17", "%18")    \
  PULLBACK_TRANSPOSED(T, type, 64, PULLBACK_SUMS_32, PULLBACK_LIST_32, "%32", "%33", "%34")    \
  PULLBACK_REGISTERS(T, type, 32, PULLBACK_SUMS_16, PULLBACK_LIST_16, "{%16, %17, %18, %19}",  \
                     "%20", "%21")                                                             \
  PULLBACK_REGISTERS(T, type, 64, PULLBACK_SUMS_32, PULLBACK_LIST_32, "{%32, %33, %34, %35}",  \
                     "%36", "%37")                                                             \
  PULLBACK_REGISTERS(T, type, 128, PULLBACK_SUMS_64, PULLBACK_LIST_64, "{%64, %65, %66, %67}", \
                     "%68", "%69")

// d = a · bᵀ, or d += a · bᵀ where adds; rows of b are columns of the product.
template <class T, int kTiles>
void product_of_shared(float (&d)[kTiles][4], uint64_t a, uint64_t b, int adds);
// d = a · b, or d += a · b where adds.
template <class T, int kTiles>
void product_of_rows(float (&d)[kTiles][4], uint64_t a, uint64_t b, int adds);
// d = aᵀ · b, or d += aᵀ · b where adds; columns of a are rows of the product.
template <class T, int kTiles>
void product_of_transposed(float (&d)[kTiles][4], uint64_t a, uint64_t b, int adds);
// d += a · b, a in registers.
template <class T, int kTiles>
void product_of_registers(float (&d)[kTiles][4], const uint32_t (&a)[4], uint64_t b);

PULLBACK_PRODUCTS(bf16, "bf16")
PULLBACK_PRODUCTS(f16, "f16")

#undef PULLBACK_PRODUCTS
#undef PULLBACK_REGISTERS
#undef PULLBACK_TRANSPOSED
#undef PULLBACK_ROWS
#undef PULLBACK_SHARED
#undef PULLBACK_IN_SHARED
#undef PULLBACK_PRODUCT
#undef PULLBACK_LIST_64
#undef PULLBACK_LIST_48
#undef PULLBACK_LIST_32
#undef PULLBACK_LIST_16
#undef PULLBACK_SUMS_64
#undef PULLBACK_SUMS_48
#undef PULLBACK_SUMS_32
#undef PULLBACK_SUMS_16
#undef PULLBACK_SUMS_OF
#undef PULLBACK_SUMS_4

// Before the first product that takes registers which other instructions wrote.
inline void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes the group of the products since the last call.
inline void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending groups, the youngest, are under way.
template <int kPending>
void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// What other instructions make of sums stays on its side of a wait.
template <int kTiles>
void keep_in_place(float (&d)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (float& x : d[n]) asm volatile("" : "+f"(x)::"memory");
  }
}

// What this thread, and those it has waited for, wrote to shared memory is seen by its products and
// bulk copies.
inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace pullback::device

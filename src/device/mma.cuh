// Tensor cores through mma.sync (sm_80): products of fragments that a warp holds in registers.
//
// Fragments, for lane = 4 · g + t of the warp (g in 0..7, t in 0..3):
//   sums, 16 x 8        d[0] (g, 2t)  d[1] (g, 2t+1)  d[2] (g+8, 2t)  d[3] (g+8, 2t+1)
//   16-bit A, 16 x 16   two elements a register: a[0] (g, 2t…)  a[1] (g+8, 2t…)
//                       a[2] (g, 2t+8…)  a[3] (g+8, 2t+8…)
//   16-bit B, 16 x 8    b[0] (k = 2t…, n = g)  b[1] (k = 2t+8…, n = g)
//   tf32 A, 16 x 8      a[0] (g, t)  a[1] (g+8, t)  a[2] (g, t+4)  a[3] (g+8, t+4)
//   tf32 B, 8 x 8       b[0] (k = t, n = g)  b[1] (k = t+4, n = g)
// So two neighbouring sums of 16 x 8, rounded and packed, are one 16-bit A of 16 x 16.
#pragma once

#include "device/float.cuh"

namespace pullback::device {

// d += a · b
template <class T>
void mma_16816(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
inline void mma_16816<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
inline void mma_16816<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Operands are f32 bit patterns whose low 13 bits the hardware ignores.
inline void mma_1688_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit elements (or 8 x 4 of 32 bits). Lanes 8i … 8i+7 give the addresses
// of the 16-byte rows of matrix i; lane 4 · g + t gets in m[i] the elements 2t, 2t+1 of its row g.
inline void load_matrices(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

// The same of the transposed matrices: lane 4 · g + t gets rows 2t, 2t+1 of column g.
inline void load_matrices_transposed(uint32_t (&m)[4], uint32_t row_address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row_address)
               : "memory");
}

}  // namespace pullback::device

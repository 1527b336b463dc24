// How many rows have each bit set: one thread per column of T, counters as bit planes in registers.
#include "ibp.cuh"

constexpr int PLANES = 16;

/// Full adder of three words, bit by bit.
template <typename T> __device__ __forceinline__ T add(T &sum, T a, T b) {
    T carry = (T)((sum & a) | (sum & b) | (a & b));
    sum = (T)(sum ^ a ^ b);
    return carry;
}

/// Add `word` to the planes from `from` on.
template <typename T> __device__ __forceinline__ void ripple(T (&plane)[PLANES], T word, int from) {
#pragma unroll
    for (int k = 0; k < PLANES; ++k) {
        if (k < from) continue;
        if (!word) break;
        T carry = (T)(plane[k] & word);
        plane[k] = (T)(plane[k] ^ word);
        word = carry;
    }
}

/// counts[(column % period) * bits of T + b] += rows of `n` whose column has bit b set. Rows of `columns` columns;
/// blocks in y take `slab` rows each, fewer than 2^PLANES: the planes hold no more.
template <typename T>
__global__ void count(const T *rows, u64 n, u64 columns, u64 period, u64 slab, u64 *counts) {
    u64 column = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    u64 row = blockIdx.y * slab, end = min(n, row + slab);
    const T *at = rows + row * columns + column;
    T plane[PLANES] = {};
    for (; row + 16 <= end; row += 16, at += 16 * columns) {
        T w[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = at[i * columns];
        T two[8], four[4], eight[2];
#pragma unroll
        for (int i = 0; i < 8; ++i) two[i] = add(plane[0], w[2 * i], w[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = add(plane[1], two[2 * i], two[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) eight[i] = add(plane[2], four[2 * i], four[2 * i + 1]);
        ripple(plane, add(plane[3], eight[0], eight[1]), 4);
    }
    for (; row < end; ++row, at += columns) ripple(plane, *at, 0);
    u64 *to = counts + column % period * (8 * sizeof(T));
    for (u32 b = 0; b < 8 * sizeof(T); ++b) {
        u32 sum = 0;
#pragma unroll
        for (int k = 0; k < PLANES; ++k) sum |= ((u32)(plane[k] >> b) & 1u) << k;
        if (sum) atomicAdd(to + b, (u64)sum);
    }
}

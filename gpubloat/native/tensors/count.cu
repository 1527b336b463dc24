// How many rows have each bit set. The matrix is read as lines: whole rows that make whole words. One thread per column
// of words, its counters as bit planes in registers.
//
// A batch of lines is loaded while the one before it is added, so that the compiler cannot but keep all of its loads on
// their way at once. A block empties its counters once, in the order in which they lie in memory: atomic additions of a
// warp that fall into few sectors are what makes dense matrices as fast as those whose counts are mostly zero.
#include "ibp.cuh"

constexpr u32 PLANES = 16, LINES = 16;  // of a batch
constexpr u32 COLUMNS = 256;            // threads of a block

/// Full adder of three words, bit by bit.
__device__ __forceinline__ u32 add(u32 &sum, u32 a, u32 b) {
    u32 carry = (sum & a) | (sum & b) | (a & b);
    sum ^= a ^ b;
    return carry;
}

/// counts[i] += rows that have bit i of `period` set. A line has `columns` words; blocks in y take `slab` lines each,
/// fewer than 2^PLANES: the planes hold no more. Shared memory: PLANES * COLUMNS words.
__global__ void count(const u8 *rows, u64 n_bytes, u32 columns, u64 period, u64 slab, u64 *counts) {
    DYNAMIC_SHARED(shared);
    u32 *planes = (u32 *)shared;
    u64 lead = min(n_bytes, (0ull - (u64)rows) & 3), n_words = (n_bytes - lead) / 4;
    u64 left = (u64)blockIdx.x * COLUMNS, column = left + threadIdx.x;
    u64 begin = blockIdx.y * slab * columns + column, end = min(n_words, (blockIdx.y + 1) * slab * columns);
    u32 lines = column < columns && begin < end ? (u32)((end - begin - 1) / columns) + 1 : 0;
    const u32 *at = (const u32 *)(rows + lead) + begin;
    u32 plane[PLANES] = {}, ahead[LINES];
#pragma unroll
    for (u32 i = 0; i < LINES; ++i) ahead[i] = i < lines ? at[(u64)columns * i] : 0;
    while (lines) {
        u32 w[LINES], two[8], four[4], eight[2];
        lines -= min(lines, LINES);
        at += (u64)columns * LINES;
#pragma unroll
        for (u32 i = 0; i < LINES; ++i) {
            w[i] = ahead[i];
            ahead[i] = i < lines ? at[(u64)columns * i] : 0;
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) two[i] = add(plane[0], w[2 * i], w[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] = add(plane[1], two[2 * i], two[2 * i + 1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) eight[i] = add(plane[2], four[2 * i], four[2 * i + 1]);
        u32 carry = add(plane[3], eight[0], eight[1]);
#pragma unroll
        for (u32 k = 4; k < PLANES; ++k) {
            u32 next = plane[k] & carry;
            plane[k] ^= carry;
            carry = next;
        }
    }
#pragma unroll
    for (u32 k = 0; k < PLANES; ++k) planes[k * COLUMNS + threadIdx.x] = plane[k];
    __syncthreads();
    // Of the block's bits, those that are `step` apart are the same bit of a row, if rows are so short.
    const u32 bits = COLUMNS * 32, step = period < bits ? (u32)period : bits;
    u64 to = (8 * lead + 32 * left + threadIdx.x) % period;
    for (u32 i = threadIdx.x; i < step; i += COLUMNS) {
        u32 sum = 0;
#pragma unroll 1
        for (u32 bit = i; bit < bits; bit += step)
#pragma unroll
            for (u32 k = 0; k < PLANES; ++k) sum += (planes[k * COLUMNS + bit / 32] >> bit % 32 & 1) << k;
        if (sum) atomicAdd(counts + to, (u64)sum);
        to += COLUMNS;
        if (to >= period) to -= period;
    }
    // Bytes before the first word and behind the last one.
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x < n_bytes - 4 * n_words) {
        u64 byte = threadIdx.x < lead ? threadIdx.x : 4 * n_words + threadIdx.x;
        for (u32 b = 0; b < 8; ++b)
            if (rows[byte] >> b & 1) atomicAdd(counts + (8 * byte + b) % period, (u64)1);
    }
}

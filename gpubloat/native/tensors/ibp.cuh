// What the kernels of this folder share: types, bit tools, warp scans, asynchronous copies.
//
// Compiled by NVRTC, and as host C++ by the tests, which bring their own warp.
//
// Everything works on 32-bit words of a row, little-endian, whatever the width W of a chunk: the kept bits of the
// chunks in a word, one after the other, are the kept bits of the word. Only flags know about chunks.
//
// The codebook ("book") is four arrays of `padded` words, a multiple of 128: always, mask, value, and rank, the number
// of flags before the word. Bits behind the row's end are `always` with value 0: nothing of them is kept.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ALL = 0xffffffffu;
constexpr u32 ERROR_INDEX = 1, ERROR_ROW = 2;  // bits of the error word: index out of range; row outside of the words

#ifndef GPUBLOAT_EMULATED
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

/// Through the L1 cache ("ca"), not past it ("cg"): a line of the host's memory that two rows share, or a row that comes
/// twice in order, should cross the link once. With "cg" an H200 gained nothing from rows that come twice.
__device__ __forceinline__ void copy16(void *to, u64 from) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4(void *to, u64 from) {
    u32 at = (u32)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at), "l"(from) : "memory");
}
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
#endif

struct Scan {
    u32 before, total;
};

/// Sum over the lanes before this one, and over all lanes.
__device__ __forceinline__ Scan scan(u32 own, u32 lane) {
    u32 sum = own;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
        u32 other = __shfl_up_sync(ALL, sum, d);
        if (lane >= (u32)d) sum += other;
    }
    return {sum - own, __shfl_sync(ALL, sum, 31)};
}

template <typename T> __device__ __forceinline__ T sum_of_lanes(T own) {
#pragma unroll
    for (int d = 16; d; d >>= 1) own += __shfl_xor_sync(ALL, own, d);
    return own;
}

// pdep and pext, run by run. A run of `keep` that begins at bit b moves by the number of zeros of keep below b.

/// The low bits of `bits`, in order, to where `keep` is 1; 0 elsewhere.
__device__ __forceinline__ u32 expand(u32 bits, u32 keep) {
    u32 out = 0, rest = keep;
    while (rest) {
        u32 low = rest & (0u - rest), sum = rest + low;
        out |= (bits << __popc(~keep & (low - 1))) & rest & ~sum;
        rest &= sum;
    }
    return out;
}

/// The bits of `word` where `keep` is 1, in order, as the low bits of the result.
__device__ __forceinline__ u32 extract(u32 word, u32 keep) {
    u32 out = 0, rest = keep;
    while (rest) {
        u32 low = rest & (0u - rest), sum = rest + low;
        out |= (word & rest & ~sum) >> __popc(~keep & (low - 1));
        rest &= sum;
    }
    return out;
}

/// What the flags in `bits` (lowest first) take out of N words: the masks of the chunks whose flag is 1. A chunk
/// without mask has no flag.
template <int W, int N> __device__ __forceinline__ void taken(const u32 (&mask)[N], u32 bits, u32 (&take)[N]) {
    static_assert(W != 64 || N % 2 == 0, "a chunk of 64 bits is two words");
#pragma unroll
    for (int i = 0; i < N; ++i) take[i] = 0;
#pragma unroll
    for (int i = 0; i < N; i += W == 64 ? 2 : 1) {
#pragma unroll
        for (int j = 0; j < 32; j += W) {
            u32 part = mask[i] & ((ALL >> (W < 32 ? 32 - W : 0)) << j), all = part;
            if constexpr (W == 64) all |= mask[i + 1];
            u32 flagged = all != 0, on = 0u - (bits & flagged & 1);
            take[i] |= part & on;
            if constexpr (W == 64) take[i + 1] = mask[i + 1] & on;
            bits >>= flagged;
        }
    }
}

/// The flags of N words that differ from the codebook's value in `diff`, lowest first in `bits`. Returns their number.
template <int W, int N> __device__ __forceinline__ u32 flags_of(const u32 (&mask)[N], const u32 (&diff)[N], u32 &bits) {
    u32 n = bits = 0;
#pragma unroll
    for (int i = 0; i < N; i += W == 64 ? 2 : 1) {
#pragma unroll
        for (int j = 0; j < 32; j += W) {
            u32 part = mask[i] & ((ALL >> (W < 32 ? 32 - W : 0)) << j), all = part, off = part & diff[i];
            if constexpr (W == 64) all |= mask[i + 1], off |= mask[i + 1] & diff[i + 1];
            bits |= (u32)(all != 0 && off == 0) << n;
            n += all != 0;
        }
    }
    return n;
}

/// Word `at` of a row, bytes behind its end 0. Nothing outside the row is read.
__device__ __forceinline__ u32 load_word(const u8 *row, u64 at, u64 row_bytes, bool aligned) {
    u64 byte = at * 4;
    if (aligned && byte + 4 <= row_bytes) return *(const u32 *)(row + byte);
    u32 word = 0;
    for (u32 k = 0; k < 4; ++k)
        if (byte + k < row_bytes) word |= (u32)row[byte + k] << (8 * k);
    return word;
}

/// Write word `at` of a row, of its last word only the bytes inside the row.
__device__ __forceinline__ void store_word(u8 *row, u64 at, u64 row_bytes, u32 word) {
    u64 byte = at * 4;
    if (byte + 4 <= row_bytes && ((u64)row & 3) == 0) {
        *(u32 *)(row + byte) = word;
        return;
    }
    for (u32 k = 0; k < 4; ++k)
        if (byte + k < row_bytes) row[byte + k] = (u8)(word >> (8 * k));
}

__device__ __forceinline__ u64 warp_of_grid() { return ((u64)blockIdx.x * blockDim.x + threadIdx.x) >> 5; }
__device__ __forceinline__ u64 warps_of_grid() { return ((u64)gridDim.x * blockDim.x) >> 5; }

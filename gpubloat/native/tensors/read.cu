// Plain rows by index: the same reads as `unpack` makes, of rows that are not packed.
#include "ibp.cuh"

/// One warp per row, in units of T that divide the row and its address; reads begin at multiples of 128 bytes.
template <typename T>
__global__ void read_rows(const u8 *rows, u64 n_rows, const i64 *indices, u64 n, u64 row_bytes, u8 *out, u32 *error) {
    constexpr u32 UNROLL = 4, STEP = 32 * sizeof(T);
    u32 lane = threadIdx.x % 32;
    for (u64 i = warp_of_grid(); i < n; i += warps_of_grid()) {
        u64 row = indices ? (u64)indices[i] : i;
        if (row >= n_rows) {
            if (lane == 0) atomicOr(error, ERROR_INDEX);
            continue;
        }
        u64 begin = (u64)(rows + row * row_bytes), end = begin + row_bytes, to = (u64)(out + i * row_bytes);
        for (u64 at = (begin & ~127ull) + lane * sizeof(T); at < end; at += UNROLL * STEP) {
            T unit[UNROLL];
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k)
                if (at + k * STEP >= begin && at + k * STEP < end) unit[k] = *(const T *)(at + k * STEP);
#pragma unroll
            for (u32 k = 0; k < UNROLL; ++k)
                if (at + k * STEP >= begin && at + k * STEP < end) *(T *)(to + (at + k * STEP - begin)) = unit[k];
        }
    }
}

/// Copy packed rows as they are, each into a slot of its own; rows longer than a slot are left out.
__global__ void move_rows(const u32 *words, u64 n_words, const u32 *row_words, const u64 *offsets, u64 stride,
                          u64 n_rows, const i64 *indices, const i64 *places, u64 n, u64 slot_words, u64 n_slots,
                          u32 *slots, u32 *slot_lengths, u32 *error) {
    u32 lane = threadIdx.x % 32;
    for (u64 i = warp_of_grid(); i < n; i += warps_of_grid()) {
        u64 row = (u64)indices[i], slot = (u64)places[i];
        u32 bad = row >= n_rows || slot >= n_slots ? ERROR_INDEX : 0u;
        u64 first = bad ? 0 : offsets ? offsets[row] : row * stride;
        u32 length = bad ? 0 : row_words[row];
        if (first > n_words || length > n_words - first) bad |= ERROR_ROW;
        if (bad || length > slot_words) {
            if (bad && lane == 0) atomicOr(error, bad);
            continue;
        }
        for (u32 k = lane; k < length; k += 32) slots[slot * slot_words + k] = words[first + k];
        if (lane == 0) slot_lengths[slot] = length;
    }
}

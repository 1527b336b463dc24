// The kernels of gpubloat/native/tensors behind plain C calls, on the emulated warp.
#include "warp.h"

#include "unpack.cu"
namespace packing {
#include "pack.cu"
}
#include "count.cu"
#include "read.cu"

using emulated::launch;

template <int W, int N, int STAGES, bool BOOK_SHARED>
static int run_unpack(unsigned grid, unsigned threads, size_t shared, const u32 *words, u64 n_words, u64 base,
                      const u32 *row_words, const u64 *offsets, u64 stride, u64 n_rows, const i64 *indices,
                      const i64 *places, u64 n, u64 n_out, u32 tile, const u32 *book, u32 padded, u32 n_flags, u8 *out,
                      u64 row_bytes, u32 *error) {
    emulated::readable_from = (u64)words;
    emulated::readable_to = (u64)(words + n_words);
    launch({grid}, threads, shared, [&] {
        unpack<W, N, STAGES, BOOK_SHARED>(words, n_words, base, row_words, offsets, stride, n_rows, indices, places, n,
                                          n_out, tile, book, padded, n_flags, out, row_bytes, error);
    });
    return 0;
}

#define UNPACK(W, N, STAGES, SHARED)                                 \
    if (w == W && words_per_lane == N && stages == STAGES && in_shared == SHARED) \
        return run_unpack<W, N, STAGES, SHARED>(grid, threads, shared, args...);
template <typename... Args>
static int any_unpack(int w, int words_per_lane, int stages, int in_shared, unsigned grid, unsigned threads,
                      size_t shared, Args... args) {
    UNPACK(8, 1, 4, true) UNPACK(8, 2, 4, true) UNPACK(8, 4, 8, false)
    UNPACK(16, 1, 4, true) UNPACK(16, 2, 4, true) UNPACK(16, 4, 8, false)
    UNPACK(32, 1, 4, true) UNPACK(32, 2, 4, true) UNPACK(32, 4, 4, false)
    UNPACK(64, 2, 4, true) UNPACK(64, 4, 8, false)
    return 1;
}

extern "C" {
void emulate_eager(int on) { emulated::eager = on; }
u64 emulate_small_copies() { return emulated::small_copies; }

int emulate_unpack(int w, int words_per_lane, int stages, int in_shared, unsigned grid, unsigned threads,
                   size_t shared, const u32 *words, u64 n_words, u64 base, const u32 *row_words, const u64 *offsets,
                   u64 stride, u64 n_rows, const i64 *indices, const i64 *places, u64 n, u64 n_out, u32 tile, const u32 *book,
                   u32 padded, u32 n_flags, u8 *out, u64 row_bytes, u32 *error) {
    return any_unpack(w, words_per_lane, stages, in_shared, grid, threads, shared, words, n_words, base, row_words,
                      offsets, stride, n_rows, indices, places, n, n_out, tile, book, padded, n_flags, out, row_bytes, error);
}

#define BY_WIDTH(call) w == 8 ? call(8) : w == 16 ? call(16) : w == 32 ? call(32) : call(64)
void emulate_sizes(int w, unsigned grid, unsigned threads, const u8 *rows, u64 n, u64 row_bytes, const u32 *book,
                   u32 padded, u32 n_flags, u32 *row_words) {
    launch({grid}, threads, 0, [&] {
#define CALL(W) packing::row_sizes<W>(rows, n, row_bytes, book, padded, n_flags, row_words)
        BY_WIDTH(CALL);
    });
}
void emulate_pack(int w, unsigned grid, unsigned threads, const u8 *rows, u64 n, u64 row_bytes, const u32 *book,
                  u32 padded, const u32 *row_words, const u64 *offsets, u64 stride, u32 *words) {
    launch({grid}, threads, threads / 32 * 66 * 4, [&] {
#undef CALL
#define CALL(W) packing::pack<W>(rows, n, row_bytes, book, padded, row_words, offsets, stride, words)
        BY_WIDTH(CALL);
    });
}
void emulate_count(unsigned grid_x, unsigned grid_y, unsigned threads, size_t shared, const u8 *rows, u64 n_bytes,
                   u32 columns, u64 period, u64 slab, u64 *counts) {
    launch({grid_x, grid_y}, threads, shared, [&] { count(rows, n_bytes, columns, period, slab, counts); });
}
void emulate_read(int bytes, unsigned grid, unsigned threads, const u8 *rows, u64 n_rows, const i64 *indices, u64 n,
                  u64 row_bytes, u8 *out, u32 *error) {
    launch({grid}, threads, 0, [&] {
        if (bytes == 1) read_rows<u8>(rows, n_rows, indices, n, row_bytes, out, error);
        if (bytes == 2) read_rows<u16>(rows, n_rows, indices, n, row_bytes, out, error);
        if (bytes == 4) read_rows<u32>(rows, n_rows, indices, n, row_bytes, out, error);
        if (bytes == 8) read_rows<u64>(rows, n_rows, indices, n, row_bytes, out, error);
        if (bytes == 16) read_rows<uint4>(rows, n_rows, indices, n, row_bytes, out, error);
    });
}
void emulate_move(unsigned grid, unsigned threads, const u32 *words, u64 n_words, const u32 *row_words,
                  const u64 *offsets, u64 stride, u64 n_rows, const i64 *indices, const i64 *places, u64 n,
                  u64 slot_words, u64 n_slots, u32 *slots, u32 *slot_lengths, u32 *error) {
    launch({grid}, threads, 0, [&] {
        move_rows(words, n_words, row_words, offsets, stride, n_rows, indices, places, n, slot_words, n_slots, slots,
                  slot_lengths, error);
    });
}
}

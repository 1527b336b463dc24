// Plain rows to packed rows, one warp per row: first the lengths, then, when the caller knows where rows begin, the
// bits.
#include "ibp.cuh"

constexpr int N = 2;  // words per lane: a chunk of 64 bits is in one lane

/// What a lane knows of its words: how they differ from the codebook's value, and what is kept of them.
template <int W> struct Part {
    u32 word[N], keep[N], flags, n_flags, length, violated;

    __device__ Part(const u8 *row, u64 row_bytes, bool aligned, const u32 *book, u32 padded, u32 at) {
        u32 mask[N], diff[N], take[N];
        violated = length = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            word[i] = load_word(row, at + i, row_bytes, aligned);
            mask[i] = book[padded + at + i];
            diff[i] = word[i] ^ book[2 * padded + at + i];
            violated |= diff[i] & book[at + i];
        }
        n_flags = flags_of<W>(mask, diff, flags);
        taken<W>(mask, flags, take);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            keep[i] = ~(book[at + i] | take[i]);
            length += __popc(keep[i]);
        }
    }
};

/// row_words[r]: the words that row r takes; as many as the plain row has where it is stored as it is.
template <int W>
__global__ void row_sizes(const u8 *rows, u64 n, u64 row_bytes, const u32 *book, u32 padded, u32 n_flags,
                          u32 *row_words) {
    u32 lane = threadIdx.x % 32, raw_words = (u32)((row_bytes + 3) / 4);
    for (u64 r = warp_of_grid(); r < n; r += warps_of_grid()) {
        const u8 *row = rows + r * row_bytes;
        bool aligned = ((u64)row & 3) == 0;
        u64 bits = 0;
        u32 violated = 0;
        for (u32 at = lane * N; at < raw_words; at += 32 * N) {
            Part<W> part(row, row_bytes, aligned, book, padded, at);
            bits += part.length;
            violated |= part.violated;
        }
        u64 packed = (sum_of_lanes(bits) + n_flags + 31) / 32;
        bool raw = __ballot_sync(ALL, violated != 0) || packed >= raw_words;
        if (lane == 0) row_words[r] = raw ? raw_words : (u32)packed;
    }
}

/// Appends bits of all lanes to a row in memory, in the order of lanes; whole words are written when they are full.
struct Writer {
    u32 *stage;  // 32 * N + 2 words of shared memory, zero
    u32 *to;
    u32 lane, fill = 0;  // bits in stage

    __device__ void put(u32 at, u32 bits, u32 length) {
        if (length == 0) return;
        u64 shifted = (u64)bits << (at % 32);
        atomicOr(stage + at / 32, (u32)shifted);
        if (at % 32 + length > 32) atomicOr(stage + at / 32 + 1, (u32)(shifted >> 32));
    }

    /// `a` of `na` bits, then `b` of `nb` bits, of each lane; at most 64 in all.
    __device__ void append(u32 a, u32 na, u32 b, u32 nb) {
        Scan bits = scan(na + nb, lane);
        put(fill + bits.before, a, na);
        put(fill + bits.before + na, b, nb);
        fill += bits.total;
        __syncwarp();
        flush(fill / 32);
        fill %= 32;
    }

    /// Write `n` words; the one behind them becomes the first.
    __device__ void flush(u32 n) {
        u32 carry = stage[n];
        for (u32 i = lane; i < n; i += 32) to[i] = stage[i];
        to += n;
        __syncwarp();
        for (u32 i = lane; i <= n; i += 32) stage[i] = i == 0 ? carry : 0u;
        __syncwarp();
    }
};

/// Shared memory: 32 * N + 2 words for each warp. Without offsets, row r begins at r * stride and is filled with zeros.
template <int W>
__global__ void pack(const u8 *rows, u64 n, u64 row_bytes, const u32 *book, u32 padded, const u32 *row_words,
                     const u64 *offsets, u64 stride, u32 *words) {
    DYNAMIC_SHARED(shared);
    u32 lane = threadIdx.x % 32, raw_words = (u32)((row_bytes + 3) / 4);
    u32 *stage = (u32 *)shared + threadIdx.x / 32 * (32 * N + 2);
    for (u64 r = warp_of_grid(); r < n; r += warps_of_grid()) {
        const u8 *row = rows + r * row_bytes;
        bool aligned = ((u64)row & 3) == 0;
        u32 *to = words + (offsets ? offsets[r] : r * stride);
        if (!offsets)
            for (u64 i = row_words[r] + lane; i < stride; i += 32) to[i] = 0;
        if (row_words[r] == raw_words) {
            for (u32 i = lane; i < raw_words; i += 32) to[i] = load_word(row, i, row_bytes, aligned);
            continue;
        }
        for (u32 i = lane; i < 32 * N + 2; i += 32) stage[i] = 0;
        __syncwarp();
        Writer writer{stage, to, lane};
        for (u32 first = 0; first < raw_words; first += 32 * N) {
            Part<W> part(row, row_bytes, aligned, book, padded, first + lane * N);
            writer.append(part.flags, part.n_flags, 0, 0);
        }
        for (u32 first = 0; first < raw_words; first += 32 * N) {
            Part<W> part(row, row_bytes, aligned, book, padded, first + lane * N);
            u32 a = __popc(part.keep[0]), b = __popc(part.keep[1]);
            writer.append(extract(part.word[0], part.keep[0]), a, extract(part.word[1], part.keep[1]), b);
        }
        if (writer.fill) writer.flush(1);
        __syncwarp();
    }
}

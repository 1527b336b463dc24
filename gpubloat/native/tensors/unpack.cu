// Packed rows to plain rows. One warp per row; the words of a row, and of the rows behind it, pass through a ring in
// shared memory that asynchronous copies fill while earlier words are decoded. The source may be memory of the device
// or pinned memory of the host, where each copy of a part of a line of 128 bytes is a request of its own. So segments
// begin at multiples of 128 bytes and are copied in whole units of 16, also where these reach out of the row, but never
// out of the words: one request for each line.
#include "ibp.cuh"

constexpr u32 SEGMENT = 128;            // words copied at once: 16 bytes per lane
constexpr u32 SEGMENT_BITS = SEGMENT * 32;
constexpr u32 FLAG_BLOCK = 1024;        // flags that one load of the warp brings

struct Rows {
    const u32 *words;      // where rows lie
    u64 n_words, base;     // how many words there are, and the number of the first
    const u32 *row_words;  // length of each row
    const u64 *offsets;    // number of each row's first word, or null: row r begins at r * stride
    u64 stride, n_rows;
    const i64 *indices, *places;  // null, or which rows to decode; null, or which row of the output each becomes
    u64 n, n_out;                 // rows to decode; rows of the output
    u32 tile;                     // rows in a row that a warp takes, at most 32
    u32 *error;
};

struct Entry {
    u64 at, to;  // address of the first word that goes through the ring; row of the output
    u32 words, segments;
};

/// The ring of one warp. All members but the batch (`my_`) are equal in all lanes.
template <int STAGES> struct Ring {
    static constexpr u32 MASK = STAGES * SEGMENT - 1;
    const Rows &rows;
    u32 *words;
    Entry *queue;
    u32 lane, raw_words, skip;
    u64 next_tile;
    u64 my_at, my_to;
    u32 my_words, todo = 0;
    u64 segment = 0;           // address of the next one to copy
    u32 before = 0, left = 0;  // bytes of it before the row; bytes from its begin to the end of what to copy
    u32 queued = 0, oldest = 0;

    __device__ Ring(const Rows &rows, u32 *words, Entry *queue, u32 lane, u32 raw_words, u32 skip)
        : rows(rows), words(words), queue(queue), lane(lane), raw_words(raw_words), skip(skip),
          next_tile(warp_of_grid()) {}

    /// Each lane looks up one row of the next tile.
    __device__ bool batch() {
#pragma unroll 1
        while (todo == 0) {
            if (next_tile * rows.tile >= rows.n) return false;
            u64 i = next_tile * rows.tile + lane, row = i;
            next_tile += warps_of_grid();
            bool valid = lane < rows.tile && i < rows.n;
            if (valid) {
                if (rows.indices) row = (u64)rows.indices[i];
                my_to = rows.places ? (u64)rows.places[i] : i;
                if (row >= rows.n_rows || my_to >= rows.n_out) {
                    atomicOr(rows.error, ERROR_INDEX);
                    valid = false;
                }
            }
            if (valid) {
                my_words = rows.row_words[row];
                u64 first = (rows.offsets ? rows.offsets[row] : row * rows.stride) - rows.base;
                my_at = (u64)(rows.words + first);
                if (my_words > raw_words || first > rows.n_words || my_words > rows.n_words - first) {
                    atomicOr(rows.error, ERROR_ROW);
                    valid = false;
                }
            }
            todo = __ballot_sync(ALL, valid);
        }
        return true;
    }

    /// Begin to copy the next row: it enters the queue with at least one segment.
    __device__ bool next_row() {
        if (!batch()) return false;
        u32 from = __ffs(todo) - 1;
        todo &= todo - 1;
        u64 at = __shfl_sync(ALL, my_at, from), to = __shfl_sync(ALL, my_to, from);
        u32 n = __shfl_sync(ALL, my_words, from);
        u64 begin = at + 4ull * (n == raw_words ? 0 : min(skip, n)), end = at + 4ull * n;
        segment = begin & ~127ull;
        before = (u32)begin & 127;
        left = max(1u, (u32)(end - segment));
        if (lane == 0) queue[queued % STAGES] = {begin, to, n, (left + 4 * SEGMENT - 1) / (4 * SEGMENT)};
        // If the next row begins in this one's last line, the line is read to its end: it is in the L1 cache then.
        u64 next = __shfl_sync(ALL, my_at, todo ? __ffs(todo) - 1 : from);
        if (next >= end && next / 128 == (end - 1) / 128) left = (left + 127) & ~127u;
        ++queued;
        return true;
    }

    /// Start the copy of one more segment to a slot of the ring; an empty group if there is none, so that groups can be
    /// counted.
    __device__ void issue(u32 slot) {
        if (left || next_row()) {
            u64 unit = segment + 16 * lane, low = (u64)rows.words, high = low + 4 * rows.n_words;
            u32 *to = words + slot * SEGMENT + 4 * lane;
            if (16 * lane + 16 > before && 16 * lane < left) {
                if (unit >= low && unit + 16 <= high)
                    copy16(to, unit);
                else  // the first or last words of all
                    for (u32 k = 0; k < 4; ++k)
                        if (unit + 4 * k >= low && unit + 4 * k < high) copy4(to + k, unit + 4 * k);
            }
            segment += 4 * SEGMENT;
            before = 0;
            left -= min(left, 4 * SEGMENT);
        }
        commit();
    }

    /// The oldest segment has been read by this lane.
    __device__ void release() {
        __syncwarp();
        issue(oldest % STAGES);
        ++oldest;
    }

    /// Until the oldest segment is there, or the oldest two.
    __device__ void arrive(bool two) {
        if (two)
            wait<STAGES - 2>();
        else
            wait<STAGES - 1>();
        __syncwarp();
    }

    /// Word `i` behind the begin of the oldest segment.
    __device__ u32 word(u32 i) const { return words[(oldest * SEGMENT + i) & MASK]; }
};

template <int N> __device__ __forceinline__ void load(const u32 *from, u32 (&to)[N]) {
    if constexpr (N == 4) {
        uint4 v = *(const uint4 *)from;
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    } else if constexpr (N == 2) {
        uint2 v = *(const uint2 *)from;
        to[0] = v.x, to[1] = v.y;
    } else
        to[0] = *from;
}

template <int N> __device__ __forceinline__ void store(u8 *row, u64 at, u64 row_bytes, const u32 (&w)[N]) {
    bool whole = (at + N) * 4 <= row_bytes && ((u64)row & (4 * N - 1)) == 0;
    if constexpr (N == 4) {
        if (whole) {
            *(uint4 *)(row + at * 4) = make_uint4(w[0], w[1], w[2], w[3]);
            return;
        }
    } else if constexpr (N == 2) {
        if (whole) {
            *(uint2 *)(row + at * 4) = make_uint2(w[0], w[1]);
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) store_word(row, at + i, row_bytes, w[i]);
}

/// Flags of one row: two blocks of 1,024 in shared memory. Few flags come from the ring, more by loads of their own,
/// the next block while this one is in use.
struct Flags {
    u32 *area;
    const u32 *from;  // the row's first word in memory
    u32 n_words, lane, loaded = 0, ahead = 0;

    __device__ u32 fetch(u32 block) const {
        u32 at = block * 32 + lane;
        return at < n_words ? from[at] : 0u;
    }
    /// Make the blocks of `rank` and of what lies up to 1,024 behind it readable. `rank` is equal in all lanes.
    __device__ void need(u32 rank) {
        u32 until = rank / FLAG_BLOCK + 2;
        if (loaded >= until) return;
        __syncwarp();
        for (; loaded < until; ++loaded) {
            area[loaded % 2 * 32 + lane] = ahead;
            ahead = fetch(loaded + 1);
        }
        __syncwarp();
    }
    __device__ u32 at(u32 rank) const {
        u32 i = rank / 32;
        return __funnelshift_r(area[i % 64], area[(i + 1) % 64], rank % 32);
    }
};

/// Copy a row that is not packed. Returns how many segments of it are not released yet.
template <int STAGES>
__device__ u32 copy_raw(Ring<STAGES> &ring, const Entry &row, u8 *out, u64 row_bytes) {
    u64 at = 0;
    u32 lead = (u32)(row.at & 127) / 4;
    for (u32 left = row.segments;; --left) {
        ring.arrive(false);
        for (u32 i = lead + ring.lane; i < SEGMENT; i += 32) {
            u64 word = at + i - lead;
            if (word < row.words) store_word(out, word, row_bytes, ring.word(i));
        }
        at += SEGMENT - lead;
        lead = 0;
        if (left == 1) return left;
        ring.release();
    }
}

/// Decode a row. Returns how many segments of it are not released yet.
template <int W, int N, int STAGES>
__device__ u32 decode(Ring<STAGES> &ring, Flags &flags, const Entry &row, const u32 *book, u32 padded, u32 n_flags,
                       u8 *out, u64 row_bytes) {
    u32 lane = ring.lane, left = row.segments;
    u32 position = (u32)(row.at & 127) * 8 + n_flags - ring.skip * 32;  // in bits, from the oldest segment on
    if (ring.skip == 0) {
        ring.arrive(false);
        __syncwarp();
        flags.area[lane] = ring.word((u32)(row.at & 127) / 4 + lane);
        flags.loaded = 2;
        __syncwarp();
    } else {
        flags.from = (const u32 *)row.at - min(ring.skip, row.words);
        flags.n_words = min((n_flags + 31) / 32, row.words);
        flags.loaded = 0;
        flags.ahead = flags.fetch(0);
    }
    u64 row_words = (row_bytes + 3) / 4;
    for (u32 first = 0; first < row_words; first += 32 * N) {
        u32 at = first + lane * N, rank = book[3 * padded + at];
        u32 always[N], mask[N], value[N], take[N], length = 0;
        load(book + at, always);
        load(book + padded + at, mask);
        load(book + 2 * padded + at, value);
        if (ring.skip) flags.need(__shfl_sync(ALL, rank, 0));
        taken<W>(mask, flags.at(rank), take);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            take[i] = ~(always[i] | take[i]);  // from here on: what is kept
            length += __popc(take[i]);
        }
        Scan bits = scan(length, lane);
        for (; position >= SEGMENT_BITS && left > 1; --left, position -= SEGMENT_BITS) ring.release();
        ring.arrive(position + bits.total > SEGMENT_BITS && left > 1);
        u32 bit = position + bits.before;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            u32 window = __funnelshift_r(ring.word(bit / 32), ring.word(bit / 32 + 1), bit % 32);
            bit += __popc(take[i]);
            value[i] = expand(window, take[i]) | (value[i] & ~take[i]);
        }
        if (at < row_words) store(out, at, row_bytes, value);
        position += bits.total;
    }
    return left;
}

/// Shared memory: the codebook (if BOOK_SHARED), then for each warp the ring, 64 words of flags and the queue.
/// W: bits of a chunk. N: words that a lane decodes at once (1, 2, 4; even for W = 64).
template <int W, int N, int STAGES, bool BOOK_SHARED>
__global__ void unpack(const u32 *words, u64 n_words, u64 base, const u32 *row_words, const u64 *offsets, u64 stride,
                       u64 n_rows, const i64 *indices, const i64 *places, u64 n, u64 n_out, u32 tile, const u32 *book,
                       u32 padded, u32 n_flags, u8 *out, u64 row_bytes, u32 *error) {
    static_assert((STAGES & (STAGES - 1)) == 0 && STAGES >= 4, "two segments are read while others are on their way");
    static_assert(32 / (W < 32 ? W : 32) * N <= 32, "a lane takes its flags from one word");
    DYNAMIC_SHARED(shared);
    u32 *arena = (u32 *)shared;
    u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    if (BOOK_SHARED) {
        for (u32 i = threadIdx.x; i < 4 * padded; i += blockDim.x) arena[i] = book[i];
        book = arena;
        arena += 4 * padded;
        __syncthreads();
    }
    const Rows rows = {words, n_words, base, row_words, offsets, stride, n_rows, indices, places, n, n_out, tile, error};
    u32 raw_words = (u32)((row_bytes + 3) / 4);
    u32 *area = arena + warps * STAGES * SEGMENT + warp * 64;
    Entry *queue = (Entry *)(arena + warps * (STAGES * SEGMENT + 64)) + warp * STAGES;
    // Where flags have blocks of their own, only what follows their last whole word goes through the ring.
    u32 skip = n_flags > FLAG_BLOCK ? n_flags / 32 : 0;
    Ring<STAGES> ring(rows, arena + warp * STAGES * SEGMENT, queue, lane, raw_words, skip);
    Flags flags{area, nullptr, 0, lane};
#pragma unroll 1
    for (u32 i = 0; i < STAGES; ++i) ring.issue(i);
    for (u32 row = 0; row != ring.queued; ++row) {
        __syncwarp();
        const Entry entry = queue[row % STAGES];
        __syncwarp();
        u8 *to = out + entry.to * row_bytes;
        u32 left = entry.words == raw_words
                       ? copy_raw(ring, entry, to, row_bytes)
                       : decode<W, N>(ring, flags, entry, BOOK_SHARED ? (const u32 *)shared : book, padded, n_flags, to,
                                      row_bytes);
        for (; left; --left) ring.release();
    }
    wait<0>();
}

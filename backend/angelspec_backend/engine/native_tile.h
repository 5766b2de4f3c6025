// What every way of computing a tile of attention shares: online softmax, its state, and the transpose of keys.
//
// A tile is 64 positions, whose keys and values are unpacked once for all queries of a task.  What a query
// gets is computed in one order, whatever the number of queries beside it and of positions in the tile.
#pragma once

#include "native_simd.h"

constexpr int TILE = 64;         // positions
constexpr int MAX_DIM = 256;     // of a head
constexpr int MAX_QUERIES = 512;  // (token, head) pairs that share the unpacked keys and values
constexpr float LOWEST = -1e30f;
constexpr float LOG2E = 1.44269504f;

// The positions low <= j < high of a tile that a query sees.
struct Visible {
    int low, high;
    bool none() const { return low >= high || high <= 0; }
};

// Neighbouring queries of a task, `count` of them from the first on, and what they see of a tile.
template <int MOST>
struct Stripe {
    int first, count;
    bool whole;  // all of it; then `visible` is not set
    Visible visible[MOST];
};

// Memory that will be read soon, asked for a few lines at a time between other work: all at once it would only
// wait in the queue of the core, and the CPU cannot guess where the blocks of a sequence lie.
struct Ahead {
    struct Run {
        const char *at, *end;
    } runs[2 * TILE];
    int count = 0, now = 0;

    template <class T>
    void add(const T* from, long n) {
        runs[count++] = {(const char*)from, (const char*)(from + n)};
    }
    void ask(int lines) {
        for (; now < count && lines; lines--) {
            __builtin_prefetch(runs[now].at, 0, 2);  // into L2: a tile of all heads is larger than L1
            runs[now].at += 64;
            if (runs[now].at >= runs[now].end) now++;
        }
    }
};

// What online softmax knows so far about `count` queries.
struct State {
    // The largest logit in units of log 2, and sums of the weights relative to it: [count], [count][LANES],
    // [count][width], with room for whole groups of 16 queries.
    float *best, *total, *acc;

    State(float* memory, int count) : best(memory), total(memory + rounded(count)),
                                      acc(total + LANES * rounded(count)) {}
    static int rounded(int count) { return (count + 15) / 16 * 16; }
    static long floats(int count, int width) { return (long)rounded(count) * (1 + LANES + width); }

    void clear(int count, int width) const {
        for (int i = 0; i < count; i++) best[i] = LOWEST;
        memset(total, 0, sizeof(float) * count * LANES);
        memset(acc, 0, sizeof(float) * count * width);
    }

    void merge(const State& other, int count, int width) const {
        for (int i = 0; i < count; i++) {
            float top = best[i] > other.best[i] ? best[i] : other.best[i];
            f32v mine = exp2(splat(best[i] - top)), theirs = exp2(splat(other.best[i] - top));
            best[i] = top;
            mix(total + i * LANES, other.total + i * LANES, LANES, mine, theirs);
            mix(acc + i * width, other.acc + i * width, width, mine, theirs);
        }
    }

    static void mix(float* a, const float* b, int n, f32v x, f32v y) {
        for (int i = 0; i < n; i += LANES) store(a + i, fma(load(a + i), x, load(b + i) * y));
    }
};

// Columns of 4 words of LANES keys, from an element on: [LANES keys][4 words] -> out[word][LANES keys].
template <class T>
static inline void transpose(const T* const* rows, int from, u32v out[4]) {
#if defined(__AVX512F__)
    __m512i x[4];
    for (int i = 0; i < 4; i++) {  // 128-bit lane l of x[i] is key 4 * l + i
        auto part = [&](int key) { return _mm_loadu_si128((const __m128i*)(rows[key] + from)); };
        x[i] = _mm512_castsi128_si512(part(i));
        x[i] = _mm512_inserti32x4(x[i], part(4 + i), 1);
        x[i] = _mm512_inserti32x4(x[i], part(8 + i), 2);
        x[i] = _mm512_inserti32x4(x[i], part(12 + i), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    __m512i c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    out[0] = (u32v)_mm512_unpacklo_epi64(a, c);
    out[1] = (u32v)_mm512_unpackhi_epi64(a, c);
    out[2] = (u32v)_mm512_unpacklo_epi64(b, d);
    out[3] = (u32v)_mm512_unpackhi_epi64(b, d);
#else
    typedef uint32_t u32x4 __attribute__((vector_size(16)));
    u32x4 columns[4][LANES / 4], x[4];
    for (int four = 0; four < LANES / 4; four++) {
        for (int i = 0; i < 4; i++) memcpy(&x[i], rows[4 * four + i] + from, sizeof x[i]);
        const u32x4 low = {0, 4, 1, 5}, high = {2, 6, 3, 7};
        u32x4 a = __builtin_shuffle(x[0], x[1], low), b = __builtin_shuffle(x[0], x[1], high);
        u32x4 c = __builtin_shuffle(x[2], x[3], low), d = __builtin_shuffle(x[2], x[3], high);
        columns[0][four] = __builtin_shuffle(a, c, u32x4{0, 1, 4, 5});
        columns[1][four] = __builtin_shuffle(a, c, u32x4{2, 3, 6, 7});
        columns[2][four] = __builtin_shuffle(b, d, u32x4{0, 1, 4, 5});
        columns[3][four] = __builtin_shuffle(b, d, u32x4{2, 3, 6, 7});
    }
    memcpy(out, columns, sizeof columns);
#endif
}

// The scores of N queries become logits in units of log 2 with a softcap: softcap * tanh(score * scale / softcap).
template <int N>
static inline void cap_scores(float* scores, int groups, float scale, float softcap) {
    for (int q = 0; q < N; q++)
        for (int g = 0; g < groups; g++) {
            float* at = scores + q * TILE + g * LANES;
            f32v e = exp(load(at) * splat(2 * scale / softcap));
            store(at, (splat(softcap) - splat(2 * softcap) / (e + splat(1.0f))) * splat(LOG2E));
        }
}

// Take the scores [TILE] of each of N queries into best and total; decay[q] becomes the factor by which earlier sums
// shrink, and put(q, g, a, b) gets the weights of the groups g and g + 1, the latter zero if there is none.
// Several queries at a time hide the latency of each.  WHOLE: every query sees all of the tile.
template <int N, bool WHOLE, class Put>
static inline void weigh_tile(const float* scores, const Visible* visible, int groups, f32v factor, float* best,
                              float* total, float* decay, Put put) {
    auto seen = [&](int q, int g) {
        i32v at = lane_numbers() + g * LANES;
        return (at >= visible[q].low) & (at < visible[q].high);
    };
    f32v tops[N];
    for (int q = 0; q < N; q++) tops[q] = splat(LOWEST);
    for (int g = 0; g < groups; g++)
        for (int q = 0; q < N; q++) {
            f32v s = load(scores + q * TILE + g * LANES);
            tops[q] = max(tops[q], WHOLE ? s : where(seen(q, g), s * factor, splat(LOWEST)));
        }
    f32v top = max_lanes<N>(tops);  // a lane is a query
    if (WHOLE) top = max(top * factor, splat(LOWEST));  // the largest product is that of the largest score
    const f32v before = load(best, N);
    top = max(before, top);
    store(decay, exp2(before - top), N);
    store(best, top, N);
    for (int q = 0; q < N; q++) {
        f32v sum = load(total + q * LANES) * splat(decay[q]);
        const f32v lowered = splat(best[q]);
        auto weigh = [&](int g) {
            f32v weight = exp2(fma(load(scores + q * TILE + g * LANES), factor, -lowered));
            if (!WHOLE) weight = where(seen(q, g), weight, f32v{});
            sum = sum + weight;
            return weight;
        };
        for (int g = 0; g < groups; g += 2) {
            f32v a = weigh(g);
            put(q, g, a, g + 1 < groups ? weigh(g + 1) : f32v{});
        }
        store(total + q * LANES, sum);
    }
}

// visible: of each query, or null if all see the whole tile.
template <int N, class Put>
static inline void softmax_tile(float* scores, const Visible* visible, int groups, float scale, float softcap,
                                float* best, float* total, float* decay, Put put) {
    if (softcap > 0) cap_scores<N>(scores, groups, scale, softcap);
    const f32v factor = splat(softcap > 0 ? 1 : scale * LOG2E);
    bool whole = true;
    for (int q = 0; q < N && visible; q++) whole &= visible[q].low <= 0 && visible[q].high >= groups * LANES;
    if (!whole)
        weigh_tile<N, false>(scores, visible, groups, factor, best, total, decay, put);
    else
        weigh_tile<N, true>(scores, visible, groups, factor, best, total, decay, put);
}

// One tile of attention: unpack the keys and values of 64 positions, score them, and add them up.
//
// What a query gets is computed in one order, whatever the number of queries beside it (the template
// parameter N) and of positions in the tile.
#pragma once

#include "native_simd.h"

constexpr int TILE = 64;  // positions whose keys and values are unpacked at a time
constexpr float LOWEST = -1e30f;

// What online softmax knows so far about `count` queries.
struct State {
    float *best, *total, *acc;  // [count], [count][LANES], [count][width]

    State(float* memory, int count) : best(memory), total(memory + (count + 15) / 16 * 16),
                                      acc(total + LANES * count) {}
    static long floats(int count, int width) { return (count + 15) / 16 * 16 + (long)count * (LANES + width); }

    void clear(int count, int width) const {
        for (int i = 0; i < count; i++) best[i] = LOWEST;
        memset(total, 0, sizeof(float) * count * LANES);
        memset(acc, 0, sizeof(float) * count * width);
    }

    void merge(const State& other, int count, int width) const {
        for (int i = 0; i < count; i++) {
            float top = best[i] > other.best[i] ? best[i] : other.best[i];
            f32v mine = exp(splat(best[i] - top)), theirs = exp(splat(other.best[i] - top));
            best[i] = top;
            mix(total + i * LANES, other.total + i * LANES, LANES, mine, theirs);
            mix(acc + i * width, other.acc + i * width, width, mine, theirs);
        }
    }

    static void mix(float* a, const float* b, int n, f32v x, f32v y) {
        for (int i = 0; i < n; i += LANES) store(a + i, fma(load(a + i), x, load(b + i) * y));
    }
};

// Columns of 4 words of LANES keys: [LANES keys][4 words] -> out[word][LANES keys].
static inline void transpose(const char* const* rows, long byte, u32v out[4]) {
#if defined(__AVX512F__)
    __m512i x[4];
    for (int i = 0; i < 4; i++) {  // 128-bit lane l of x[i] is key 4 * l + i
        auto part = [&](int key) { return _mm_loadu_si128((const __m128i*)(rows[key] + byte)); };
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
        for (int i = 0; i < 4; i++) memcpy(&x[i], rows[4 * four + i] + byte, sizeof x[i]);
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

// cache rows at index[0 .. groups * LANES) -> keys: [dim][TILE].  bf16 pairs widen after the transpose; the bf16
// dot product instruction is no help, on current Intel cores it has half the throughput of fp32 FMA.
template <class T>
static void unpack_keys(const T* cache, const int64_t* index, int groups, int dim, float* keys) {
    constexpr int PER_WORD = 4 / sizeof(T);
    for (int g = 0; g < groups; g++) {
        const char* rows[LANES];
        for (int i = 0; i < LANES; i++) rows[i] = (const char*)(cache + index[g * LANES + i] * dim);
        for (int d = 0; d < dim; d += 4 * PER_WORD) {
            u32v column[4];
            transpose(rows, d * sizeof(T), column);
            for (int i = 0; i < 4; i++) {
                float* to = keys + (d + i * PER_WORD) * TILE + g * LANES;
                if (PER_WORD == 1) {
                    store(to, (f32v)column[i]);
                } else {  // the lower half of a word is the earlier element
                    store(to, (f32v)(column[i] << 16));
                    store(to + TILE, (f32v)(column[i] & 0xffff0000u));
                }
            }
        }
    }
}

// cache rows at index[0 .. count) -> values: [count][width], zero beyond dim
template <class T>
static void unpack_values(const T* cache, const int64_t* index, int count, int dim, int width, float* values) {
    for (int j = 0; j < count; j++, values += width) {
        const T* from = cache + index[j] * dim;
        int d = 0;
        for (; d + LANES <= dim; d += LANES) store(values + d, load(from + d));
        if (d < dim) store(values + d, load(from + d, dim - d));
    }
}

// scores[q][j] = query[q] . key[j], summed over the dimensions in ascending order
template <int N>
static void multiply_keys(const float* query, const float* keys, int dim, int groups, float* scores) {
    for (int g = 0; g < groups; g += 2) {  // the second group of a pair may be unused
        f32v acc[N][2] = {};
        for (int d = 0; d < dim; d++) {
            f32v low = load(keys + d * TILE + g * LANES), high = load(keys + d * TILE + g * LANES + LANES);
            for (int q = 0; q < N; q++) {
                f32v x = splat(query[q * dim + d]);
                acc[q][0] = fma(low, x, acc[q][0]);
                acc[q][1] = fma(high, x, acc[q][1]);
            }
        }
        for (int q = 0; q < N; q++)
            for (int half = 0; half < 2; half++) store(scores + q * TILE + (g + half) * LANES, acc[q][half]);
    }
}

// acc[q] = acc[q] * decay[q] + sum over j < count of weights[q][j] * values[j]
template <int N, int COLUMNS>
static void add_values(const float* weights, const float* values, const float* decay, int count, int width,
                       float* acc) {
    f32v sum[N][COLUMNS];
    for (int q = 0; q < N; q++)
        for (int c = 0; c < COLUMNS; c++) sum[q][c] = load(acc + q * width + c * LANES) * splat(decay[q]);
    for (int j = 0; j < count; j++)
        for (int c = 0; c < COLUMNS; c++) {
            f32v value = load(values + j * width + c * LANES);
            for (int q = 0; q < N; q++) sum[q][c] = fma(value, splat(weights[q * TILE + j]), sum[q][c]);
        }
    for (int q = 0; q < N; q++)
        for (int c = 0; c < COLUMNS; c++) store(acc + q * width + c * LANES, sum[q][c]);
}

template <int N>
static void add_values(const float* weights, const float* values, const float* decay, int count, int width,
                       float* acc) {
    int d = 0;
    constexpr int COLUMNS = LANES == 16 ? 4 : 2;  // as many sums as registers hold
    for (; d + COLUMNS * LANES <= width; d += COLUMNS * LANES)
        add_values<N, COLUMNS>(weights, values + d, decay, count, width, acc + d);
    for (; d < width; d += LANES) add_values<N, 1>(weights, values + d, decay, count, width, acc + d);
}

// Turn the scores [TILE] of one query into weights; only positions low <= j < high are visible.  Returns
// the factor by which the earlier sums shrink.
static float softmax_tile(float* scores, int low, int high, int groups, float scale, float softcap, float* best,
                          float* total) {
    const i32v lane = lane_numbers();
    f32v tops = splat(LOWEST);
    for (int g = 0; g < groups; g++) {
        f32v s = load(scores + g * LANES) * splat(scale);
        if (softcap > 0)  // softcap * tanh(s / softcap)
            s = splat(softcap) - splat(2 * softcap) / (exp(s * splat(2 / softcap)) + splat(1.0f));
        i32v visible = (lane + g * LANES >= low) & (lane + g * LANES < high);
        s = where(visible, s, splat(LOWEST));
        store(scores + g * LANES, s);
        tops = max(tops, s);
    }
    float top = max_lanes(tops);
    top = *best > top ? *best : top;
    float decay = exp(splat(*best - top))[0];
    f32v sum = load(total) * splat(decay);
    for (int g = 0; g < groups; g++) {
        f32v weight = exp(load(scores + g * LANES) - splat(top));  // exactly 0 where not visible
        store(scores + g * LANES, weight);
        sum = sum + weight;
    }
    store(total, sum);
    *best = top;
    return decay;
}

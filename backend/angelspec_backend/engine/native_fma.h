// A tile of attention in fp32, by fused multiply-adds: for fp32, and for bf16 on CPUs without AMX.
#pragma once

#include "native_tile.h"

// rows[0 .. groups * LANES) -> keys: [dim][TILE].  bf16 pairs widen after the transpose; the bf16
// dot product instruction is no help, it has half the throughput of fp32 FMA where it is made of two of these.
template <class T>
static void unpack_keys(const T* const* rows, int groups, int dim, float* keys) {
    constexpr int PER_WORD = 4 / sizeof(T);
    for (int g = 0; g < groups; g++) {
        for (int d = 0; d < dim; d += 4 * PER_WORD) {
            u32v column[4];
            transpose(rows + g * LANES, d, column);
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

// rows[0 .. count) -> values: [count][width], zero beyond dim
template <class T>
static void unpack_values(const T* const* rows, int count, int dim, int width, float* values) {
    for (int j = 0; j < count; j++, values += width) {
        const T* from = rows[j];
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


template <class T>
struct FmaTile {
    static constexpr int STRIPE = 4;  // queries computed together in registers

    alignas(64) float keys[MAX_DIM * TILE];          // [key_dim][TILE], transposed
    alignas(64) float values[TILE * MAX_DIM];        // [TILE][width]
    alignas(64) float query[MAX_QUERIES * MAX_DIM];  // [count][key_dim]
    alignas(64) float scores[STRIPE * TILE];

    void load_query(int i, const T* from, int dim) {
        for (int d = 0; d < dim; d += LANES) store(query + i * dim + d, load(from + d, dim - d), dim - d);
    }

    void unpack(const T* const* key, const T* const* value, int count, int key_dim, int value_dim, int width,
                Ahead& ahead) {
        ahead.ask(1 << 20);
        unpack_keys(key, (count + LANES - 1) / LANES, key_dim, keys);
        unpack_values(value, count, value_dim, width, values);
    }

    template <int N>
    void stripe(int i, const Visible* visible, int count, int dim, int width, float scale, float softcap,
                const State& state) {
        int groups = (count + LANES - 1) / LANES;
        float decay[N];
        multiply_keys<N>(query + i * dim, keys, dim, groups, scores);
        softmax_tile<N>(scores, visible, groups, scale, softcap, state.best + i, state.total + i * LANES, decay,
                        [&](int q, int g, f32v a, f32v b) {
                            store(scores + q * TILE + g * LANES, a);
                            store(scores + q * TILE + (g + 1) * LANES, b);
                        });
        add_values<N>(scores, values, decay, count, width, state.acc + i * width);
    }

    void start(const Stripe<STRIPE>&, int, int, int) {}

    // Take the tile into the state of the stripe's queries.
    void finish(const Stripe<STRIPE>& stripe, int, int count, int dim, int width, float scale, float softcap,
                const State& state) {
        const int i = stripe.first, n = stripe.count;
        const Visible* visible = stripe.whole ? nullptr : stripe.visible;
        if (n == 4) this->stripe<4>(i, visible, count, dim, width, scale, softcap, state);
        if (n == 3) this->stripe<3>(i, visible, count, dim, width, scale, softcap, state);
        if (n == 2) this->stripe<2>(i, visible, count, dim, width, scale, softcap, state);
        if (n == 1) this->stripe<1>(i, visible, count, dim, width, scale, softcap, state);
    }
};

// What is computed row by row: norms, rotary positions, the activation of an MLP, the likeliest token.
#pragma once

#include <omp.h>

#include "native_simd.h"

constexpr int STEP = 32;  // elements of a row that a matrix product takes at a time
constexpr int ROWS = 32;  // rows that it takes at a time

// A matrix of `n` columns: row-major, or in the order in which matrix products read it: blocks of 32 rows, in these
// the steps, in these the rows.  Distances are in elements.
template <class T>
struct Rows {
    T* x;
    long row, step, block;  // block: of 32 rows

    static Rows row_major(T* x, long n) { return {x, n, STEP, ROWS * n}; }
    static Rows tiled(T* x, long n) { return {x, STEP, ROWS * STEP, ROWS * n}; }
    T* at(long r, long i) const { return x + r / ROWS * block + r % ROWS * row + i / STEP * step + i % STEP; }
    operator Rows<const T>() const { return {x, row, step, block}; }
};

// What one thread of a team does: [begin, end).
struct Share {
    long begin, end;

    // Its part of [0, n), in whole units.
    static Share of(long n, long unit) {
        const long units = (n + unit - 1) / unit, t = omp_get_thread_num(), threads = omp_get_num_threads();
        const long begin = units * t / threads * unit, end = units * (t + 1) / threads * unit;
        return {begin, end < n ? end : n};
    }
};

// body(i) for 0 <= i < n, shared by a team of threads; all of it is done when they leave.
template <class Body>
static void in_team(long n, Body body) {
#pragma omp for schedule(static)
    for (long i = 0; i < n; i++) body(i);
}

// The same by a team of its own if there is enough to do: even an inactive region takes a while.
template <class Body>
static void for_each(long n, bool parallel, int num_threads, Body body) {
    if (parallel && num_threads > 1) {
#pragma omp parallel num_threads(num_threads)
        in_team(n, body);
    } else {
        for (long i = 0; i < n; i++) body(i);
    }
}

// out: STEP elements lie together, and such steps `step` apart.
template <class T>
static void rms_norm_row(const T* x, T* residual, const T* weight, T* out, long n, float eps,
                         long step = STEP) {
    f32v squares = {};
    for (long i = 0; i < n; i += LANES) {
        f32v v = load(x + i, n - i);
        if (residual) {
            v = round_to<T>(v + load(residual + i, n - i));
            store(residual + i, v, n - i);
        }
        squares = fma(v, v, squares);
    }
    f32v scale = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / n + eps));
    const T* from = residual ? residual : x;
    for (long i = 0; i < n; i += LANES)
        store(out + i / STEP * step + i % STEP, load(weight + i, n - i) * round_to<T>(load(from + i, n - i) * scale),
              n - i);
}

struct RopeArgs {  // mirrored by native_args.RopeArgs
    void *qkv, *key_cache, *value_cache;
    const void *cos_sin, *query_norm, *key_norm;
    const int64_t *positions, *slot_mapping;
    int64_t key_stride, value_stride;  // elements between two blocks of a cache
    int32_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    int32_t num_threads;
    float eps;
};

// Rotate the halves of one head: x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin, each step rounded to T.
template <class T>
static void rotate(T* x, const T* cos_sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        long n = half - i;
        f32v a = load(x + i, n), b = load(x + half + i, n);
        f32v c = load(cos_sin + i, n), s = load(cos_sin + half + i, n);
        store(x + i, round_to<T>(a * c) - round_to<T>(b * s), n);
        store(x + half + i, round_to<T>(b * c) + round_to<T>(a * s), n);
    }
}

template <class T>
static void rope_token(const RopeArgs& a, long t) {
    long dim = a.head_dim, heads = a.num_heads, kv_heads = a.num_kv_heads;
    T* token = (T*)a.qkv + t * (heads + 2 * kv_heads) * dim;
    const T* cos_sin = (const T*)a.cos_sin + a.positions[t] * a.rotary_dim;
    long block = a.slot_mapping[t] / a.block_size, offset = a.slot_mapping[t] % a.block_size;
    for (long h = 0; h < heads + kv_heads; h++) {
        T* x = token + h * dim;
        const T* weight = (const T*)(h < heads ? a.query_norm : a.key_norm);
        if (weight) rms_norm_row<T>(x, nullptr, weight, x, dim, a.eps);
        rotate(x, cos_sin, a.rotary_dim / 2);
    }
    for (long h = 0; h < kv_heads; h++) {
        const long at = (h * a.block_size + offset) * dim;
        memcpy((T*)a.key_cache + block * a.key_stride + at, token + (heads + h) * dim, dim * sizeof(T));
        memcpy((T*)a.value_cache + block * a.value_stride + at, token + (heads + kv_heads + h) * dim, dim * sizeof(T));
    }
}

// silu(gate) * up of values that went through bf16 or are fp32; silu is rounded as if it were stored.
template <class T>
static inline f32v silu_and_mul(f32v gate, f32v up) {
    return round_to<T>(gate * reciprocal(splat(1.0f) + exp(-gate))) * up;
}

// Part i of the output, PART elements long, of which a row has parts(inter).  gate_up: [rows, 2 * inter], out: [rows, inter]
constexpr long PART = 1024;
static inline long parts(long inter) { return (inter + PART - 1) / PART; }

template <class T>
static void silu_and_mul(const T* gate_up, T* out, long inter, long i) {
    const long row = i / parts(inter), begin = i % parts(inter) * PART, end = begin + PART < inter ? begin + PART : inter;
    const T *gate = gate_up + row * 2 * inter, *up = gate + inter;
    for (long k = begin; k < end; k += LANES)
        store(out + row * inter + k, silu_and_mul<T>(load(gate + k, end - k), load(up + k, end - k)), end - k);
}

// The lowest index of the largest value; NaN counts as none.
template <class T>
static long argmax(const T* x, long n) {
    f32v tops = splat(-__builtin_inff());
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32v v = load(x + i);
        tops = v > tops ? v : tops;
    }
    float top = max_lanes<1>(&tops)[0];
    for (; i < n; i++) {
        float v = load(x + i, 1)[0];
        top = v > top ? v : top;
    }
    for (i = 0; i < n; i += LANES) {
        i32v hit = load(x + i, n - i) == splat(top);
        for (long j = 0; j < LANES && i + j < n; j++)
            if (hit[j]) return i + j;
    }
    return 0;
}

// The probability of the largest value under a softmax; NaN has none.  0 if the largest is not finite.
template <class T>
static float probability_of(float top, const T* x, long n) {
    if (!(top - top == 0)) return 0;
    f32v sums[4] = {};
    for (long i = 0; i < n; i += LANES) {
        f32v v = where(lane_numbers() < (int32_t)(n - i), load(x + i, n - i), splat(-__builtin_inff()));
        f32v& sum = sums[i / LANES % 4];
        sum = sum + exp(max(v - splat(top), splat(-1e4f)));  // max: of a NaN it takes the other
    }
    return 1 / sum_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// What decides most rows of logits when tokens are sampled: their likeliest tokens, and the mass of the others.
//
// One pass of maxima finds where the head of a row ends, one of exponentials sums what lies below.  The head is that
// of sampler.py, to the bit; the sum is an approximation, well within sampling_heads.SLACK.
#pragma once

#include <algorithm>
#include <vector>

#include "native_simd.h"

constexpr long HEAD_SIZE = 128, FINE = 16, COARSE = 4;  // as in sampling_heads.py
constexpr float INFINITE = __builtin_inff(), LOWEST_FINITE = -3.4028234663852886e38f;

struct HeadArgs {  // mirrored by native_args.HeadArgs
    const void* logits;        // [rows, vocab]
    const float* temperature;  // [rows], 0: greedy
    int64_t* ids;              // [rows, width]
    double* relative;          // [rows, width] logits less the largest, -inf behind the head
    int64_t* count;            // [rows] tokens in the head, also where width is too small for them
    float* facts;              // [4, rows] bound, largest (NaN: the row needs care), sum, weight at the bound
    int64_t rows, vocab, width;
    int32_t num_threads;
};

static inline float scalar(const float* p) { return *p; }
static inline float scalar(const bf16* p) {
    uint32_t bits = (uint32_t)p->bits << 16;
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// The first n lanes, the others -inf.
template <class T>
static inline f32v load_or_lowest(const T* p, long n) {
    return n >= LANES ? load(p) : where(lane_numbers() < (int32_t)n, load(p, n), splat(-INFINITE));
}

// Integers that order as the numbers do; -0 equals 0.
static inline i32v ranks(f32v v) {
    i32v bits = (i32v)(v + splat(0.0f));
    return bits ^ ((bits >> 31) & 0x7fffffff);
}
static inline int32_t rank_of(float v) { return ranks(splat(v))[0]; }
static inline float of_rank(int32_t rank) {
    int32_t bits = rank ^ ((rank >> 31) & 0x7fffffff);
    float v;
    memcpy(&v, &bits, 4);
    return v;
}

// The k-th largest of n <= room values, where room is a multiple of LANES and what lies behind n is -inf.
static float kth_largest(const float* values, long room, long k, float largest) {
    long low = rank_of(-INFINITE), high = rank_of(largest);
    while (low < high) {
        long middle = low + (high - low + 1) / 2;
        i32v reached = {};
        for (long i = 0; i < room; i += LANES) reached -= ranks(load(values + i)) >= (int32_t)middle;
        long count = 0;
        for (int i = 0; i < LANES; i++) count += reached[i];
        count >= k ? low = middle : high = middle - 1;
    }
    return of_rank(low);
}

// Classes are strided: token t is in fine class t % fine_classes, which is in coarse class t % fine_classes %
// coarse_classes.
template <class T>
struct HeadOfRow {
    const HeadArgs& args;
    const T* x;
    const long vocab, fine_classes, coarse_classes;
    std::vector<float> fine, coarse;  // maxima, with room for whole vectors, -inf where there is no class

    static long room(long n) { return (n + LANES - 1) / LANES * LANES; }

    HeadOfRow(const HeadArgs& a, long row)
        : args(a), x((const T*)a.logits + row * a.vocab), vocab(a.vocab), fine_classes((vocab + FINE - 1) / FINE),
          coarse_classes((fine_classes + COARSE - 1) / COARSE),
          fine(room(COARSE * coarse_classes) + LANES, -INFINITE), coarse(room(coarse_classes), -INFINITE) {}

    // The largest logit; NaN if one is NaN.
    float find_maxima() {
        i32v nan = {};
        for (long from = 0; from < vocab; from += fine_classes) {
            const long n = std::min(fine_classes, vocab - from);
            for (long i = 0; i < n; i += LANES) {
                f32v v = load_or_lowest(x + from + i, n - i);
                nan |= v != v;
                store(&fine[i], max(load(&fine[i]), v));
            }
        }
        f32v tops = splat(-INFINITE);
        for (long i = 0; i < coarse_classes; i += LANES) {
            f32v v = splat(-INFINITE);
            for (long k = 0; k < COARSE; k++) v = max(v, load(&fine[k * coarse_classes + i]));
            v = where(lane_numbers() < (int32_t)std::min(coarse_classes - i, (long)LANES), v, splat(-INFINITE));
            store(&coarse[i], v);
            tops = max(tops, v);
        }
        float largest;
        max_lanes<1>(&tops, &largest);
        for (int i = 0; i < LANES; i++)
            if (nan[i]) return __builtin_nanf("");
        return largest;
    }

    float find_bound(float largest) const {
        if (coarse_classes < HEAD_SIZE) return LOWEST_FINITE;
        return std::max(kth_largest(coarse.data(), room(coarse_classes), HEAD_SIZE, largest), LOWEST_FINITE);
    }

    // Order the tokens at or above the bound, likeliest first, the lower id first on ties.  Returns their number.
    long select(float bound, float largest, int64_t* ids, double* relative) const {
        uint64_t* keys = (uint64_t*)ids;
        long count = 0;
        for (long c = 0; c < fine_classes; c++) {
            if (fine[c] < bound) continue;
            for (long t = c; t < vocab; t += fine_classes) {
                const float v = scalar(x + t);
                if (v >= bound && count++ < args.width)
                    keys[count - 1] = (uint64_t)((uint32_t)~rank_of(v) ^ 0x80000000u) << 32 | (uint64_t)t;
            }
        }
        const long stored = std::min(count, (long)args.width);
        std::sort(keys, keys + stored);
        for (long i = 0; i < stored; i++) {
            relative[i] = (double)of_rank((int32_t)~((uint32_t)(keys[i] >> 32) ^ 0x80000000u)) - (double)largest;
            ids[i] = keys[i] & 0xffffffff;
        }
        for (long i = stored; i < args.width; i++) ids[i] = 0, relative[i] = -INFINITE;
        return count;
    }

    // The sum of exp((v - largest) / temperature), logits above the bound counting as the bound; and the weight of
    // the bound.  Partial sums keep the error of rounding small.
    void sum_weights(float bound, float largest, float temperature, float* sum, float* at_bound) const {
        const f32v scale = splat(temperature > 0 ? 1 / temperature : 0), top = splat(largest), edge = splat(bound);
        auto weight = [&](f32v v) { return exp(max((min(v, edge) - top) * scale, splat(-1e4f))); };
        f32v total = {};
        for (long from = 0, end; from < vocab; from = end) {
            end = std::min(from + 64 * LANES, vocab);
            f32v part = {};
            for (long i = from; i < end; i += LANES) part = part + weight(load_or_lowest(x + i, end - i));
            total = total + part;
        }
        *sum = sum_lanes(total);
        *at_bound = weight(edge)[0];
    }
};

template <class T>
static void find_head(const HeadArgs& a, long row) {
    HeadOfRow<T> op(a, row);
    float facts[4] = {0, op.find_maxima(), 0, 0};
    a.count[row] = 0;
    if (facts[1] >= LOWEST_FINITE && facts[1] <= -LOWEST_FINITE) {
        const float temperature = a.temperature[row];
        facts[0] = temperature > 0 ? op.find_bound(facts[1]) : facts[1];
        a.count[row] = op.select(facts[0], facts[1], a.ids + row * a.width, a.relative + row * a.width);
        if (temperature > 0) op.sum_weights(facts[0], facts[1], temperature, facts + 2, facts + 3);
    } else {
        facts[1] = __builtin_nanf("");
    }
    for (int i = 0; i < 4; i++) a.facts[i * a.rows + row] = facts[i];
}

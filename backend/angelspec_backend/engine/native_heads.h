// The head of a row of logits, that is its likeliest tokens, and the mass of the rest: what decides most rows.
//
// One pass of maxima finds where the head ends, one of exponentials sums what lies below.  The head is that of
// sampler.py, to the bit; the sum is an approximation, well within SLACK.
#pragma once

#include <algorithm>
#include <vector>

#include "native_simd.h"

constexpr long HEAD_SIZE = 128, FINE = 16, COARSE = 4;  // as in sampling_heads.py
constexpr double SLACK = 1e-4;
constexpr float INFINITE = __builtin_inff(), LOWEST_FINITE = -3.4028234663852886e38f;

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

// Columns as keys that sort by falling logit, then by rising number.
static inline uint64_t sort_key(float logit, long column) {
    return (uint64_t)((uint32_t)~rank_of(logit) ^ 0x80000000u) << 32 | (uint64_t)column;
}
static inline float logit_of(uint64_t key) { return of_rank((int32_t)~((uint32_t)(key >> 32) ^ 0x80000000u)); }
static inline long column_of(uint64_t key) { return (long)(key & 0xffffffff); }

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

static inline long whole_vectors(long n) { return (n + LANES - 1) / LANES * LANES; }

// Classes are strided: token t is in fine class t % fine_classes, which is in coarse class t % fine_classes %
// coarse_classes.
template <class T>
struct HeadFinder {
    const T* x;  // [columns] logits
    const long columns, fine_classes, coarse_classes;
    std::vector<float> coarse;     // maxima, -inf behind the classes
    float largest = 0, bound = 0;  // the largest logit; where the head ends

    HeadFinder(const T* logits, long columns, long vocab)
        : x(logits), columns(columns), fine_classes((vocab + FINE - 1) / FINE),
          coarse_classes((fine_classes + COARSE - 1) / COARSE), coarse(whole_vectors(coarse_classes), -INFINITE) {}

    // class_of: the coarse class of each column, or null if the columns are the whole vocabulary.  False if there
    // is no head: a logit is NaN, one is infinite, or none is finite.
    bool find_bound(const int32_t* class_of) {
        if (!(class_of ? find_maxima(class_of) : find_maxima())) return false;
        f32v tops = splat(-INFINITE);
        for (size_t i = 0; i < coarse.size(); i += LANES) tops = max(tops, load(&coarse[i]));
        largest = max_lanes<1>(&tops)[0];
        bound = LOWEST_FINITE;
        if (coarse_classes >= HEAD_SIZE)
            bound = std::max(kth_largest(coarse.data(), coarse.size(), HEAD_SIZE, largest), bound);
        return largest >= LOWEST_FINITE && largest <= -LOWEST_FINITE;
    }

    // Fill `coarse`.  False if a logit is NaN.
    bool find_maxima() {
        std::vector<float> fine(whole_vectors(COARSE * coarse_classes) + LANES, -INFINITE);
        i32v nan = {};
        for (long i = 0; i < fine_classes; i += LANES) {
            f32v top = splat(-INFINITE);
            for (long from = 0; from + i < columns; from += fine_classes) {
                f32v v = load_or_lowest(x + from + i, std::min(fine_classes, columns - from) - i);
                nan |= v != v;
                top = max(top, v);
            }
            store(&fine[i], top);
        }
        for (long i = 0; i < coarse_classes; i += LANES) {
            f32v v = splat(-INFINITE);
            for (long k = 0; k < COARSE; k++) v = max(v, load(&fine[k * coarse_classes + i]));
            store(&coarse[i], where(lane_numbers() < (int32_t)(coarse_classes - i), v, splat(-INFINITE)));
        }
        return !bits(nan);
    }

    bool find_maxima(const int32_t* class_of) {
        bool nan = false;
        for (long i = 0; i < columns; i++) {
            const float v = scalar(x + i);
            float& top = coarse[class_of[i]];
            nan |= v != v;
            top = v > top ? v : top;
        }
        return !nan;
    }

    // The sort keys of the columns at or above the bound, in order of the columns.
    std::vector<uint64_t> head() const {
        std::vector<uint64_t> keys;
        keys.reserve(2 * HEAD_SIZE);
        for (long i = 0; i < columns; i += LANES)
            for (uint32_t hits = bits(load_or_lowest(x + i, columns - i) >= splat(bound)); hits; hits &= hits - 1) {
                const long column = i + __builtin_ctz(hits);
                keys.push_back(sort_key(scalar(x + column), column));
            }
        return keys;
    }

    // An interval that holds the sum of exp((v - largest) / temperature) over the logits v below the bound, of
    // which there are all but head_size.  Those above count as the bound, and that is subtracted again; partial
    // sums keep the error of rounding small.
    void tail_mass(long head_size, float temperature, double* low, double* high) const {
        const f32v scale = splat(1 / temperature), top = splat(largest), edge = splat(bound);
        auto weight = [&](f32v v) { return exp(max((min(v, edge) - top) * scale, splat(-1e4f))); };
        f32v total = {};
        for (long from = 0, end; from < columns; from = end) {
            end = std::min(from + 64 * LANES, columns);
            f32v part = {};
            for (long i = from; i < end; i += LANES) part = part + weight(load_or_lowest(x + i, end - i));
            total = total + part;
        }
        const double sum = sum_lanes(total), mass = sum - head_size * (double)weight(edge)[0], error = SLACK * sum;
        *low = std::max(mass - error, 0.0), *high = std::max(mass, 0.0) + error + 1e-30;
    }
};

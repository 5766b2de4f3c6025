// The tail of a row of logits, in double precision: what decides the rows that their heads leave open.
#pragma once

#include <cmath>

#include "native_heads.h"

// Sums and exponentials round differently here than in NumPy: what hangs on less than this is not decided here.
constexpr double CLOSE = 1e-9;  // of scores, and relative to masses and weights, which are good to 1e-11
static inline bool is_close(double a, double b, double scale) { return std::abs(a - b) <= CLOSE * scale; }

template <class T>
struct Tail {
    const HeadFinder<T>& head;
    const long columns;
    const double temperature;
    std::vector<double> weights;  // [columns] relative to the largest of the row, 0 for what is not in the tail

    // top_k: 0, or more than the head has; ties with the k-th stay.
    Tail(const HeadFinder<T>& head, double temperature, long top_k)
        : head(head), columns(head.columns), temperature(temperature), weights(whole_vectors(columns)) {
        float lowest = -INFINITE;
        if (top_k > 0 && top_k < columns) {
            std::vector<float> values(whole_vectors(columns), -INFINITE);
            for (long i = 0; i < columns; i++) values[i] = scalar(head.x + i);
            lowest = kth_largest(values.data(), values.size(), top_k, head.largest);
        }
        const double largest = head.largest, scale = 1 / temperature;
        for (long i = 0; i < columns; i += LANES) {
            const f32v v = load_or_lowest(head.x + i, columns - i);
            const f32v inside = where((v < splat(head.bound)) & (v >= splat(lowest)), v, splat(-INFINITE));
            for (int half = 0; half < 2; half++)
                store(&weights[i + half * LANES / 2], exp((widen(inside, half) - largest) * scale));
        }
    }

    double mass() const { return sum(weights.data(), weights.size()); }

    // Keep the tokens that are preceded by less than this mass of likelier ones, or equal ones of lower id.
    // scale: of the sums that `wanted` comes from.  False if it is a close call.
    bool keep_likeliest(double wanted, double scale) {
        constexpr int BINS = 2048;
        constexpr float RANGE = 20;  // of logits at temperature 1; less likely ones share a bin
        std::vector<int32_t> bins(whole_vectors(columns));  // later ones hold less likely tokens
        const f32v bins_per_logit = splat(BINS / RANGE / (float)temperature);
        for (long i = 0; i < columns; i += LANES) {
            const f32v below = splat(head.bound) - load_or_lowest(head.x + i, columns - i);
            const i32v bin = __builtin_convertvector(min(below * bins_per_logit, splat(BINS - 1)), i32v);
            memcpy(&bins[i], &bin, sizeof bin);
        }
        std::vector<double> in_bin(BINS);
        for (long i = 0; i < columns; i++) in_bin[std::max(bins[i], 0)] += weights[i];
        int last = 0;
        double preceding = 0;
        while (last < BINS - 1 && preceding + in_bin[last] < wanted) preceding += in_bin[last++];

        std::vector<uint64_t> open;  // the tokens of the bin where it ends
        for (long i = 0; i < columns; i++)
            if (bins[i] == last && weights[i] > 0) open.push_back(sort_key(scalar(head.x + i), i));
        for (long i = 0; i < columns; i++) weights[i] = bins[i] > last ? 0 : weights[i];
        std::sort(open.begin(), open.end());
        bool is_clear = !is_close(preceding, wanted, scale);
        for (uint64_t key : open) {
            double& w = weights[column_of(key)];
            const bool is_kept = preceding < wanted;
            preceding += w;
            if (!is_kept) w = 0;
            is_clear = is_clear && !is_close(preceding, wanted, scale);
        }
        return is_clear;
    }

    // Keep the weights of at least min_p.  False if it is a close call.
    bool keep_heaviest(double min_p) {
        for (double& w : weights) {
            if (is_close(w, min_p, min_p)) return false;
            if (w < min_p) w = 0;
        }
        return true;
    }

    // The column in whose part of the mass, in the order of ids, the target lies; -1 if it is a close call.
    long column_at(double target, double mass) const {
        constexpr long STRIDE = 16 * LANES;
        double preceding = 0;
        long i = 0;
        for (double part; i + STRIDE < columns; i += STRIDE, preceding += part)
            if (preceding + (part = sum(&weights[i], STRIDE)) > target) break;
        for (; i < columns; preceding += weights[i++])
            if (preceding + weights[i] > target) break;
        if (i == columns || is_close(preceding, target, mass)) return -1;
        return is_close(preceding + weights[i], target, mass) ? -1 : i;
    }
};

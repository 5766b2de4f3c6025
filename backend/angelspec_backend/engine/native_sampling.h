// Sampled tokens of rows of logits: those of sampling_rule.py.
//
// Sums and exponentials round differently here than in NumPy, so a row that hangs on less than CLOSE is left
// UNDECIDED, which is rare, and goes by the rule as it is written down.
#pragma once

#include <cmath>

#include "native_heads.h"
#include "native_rows.h"

constexpr int32_t UNDECIDED = -1;  // as in sampler.py
constexpr double CLOSE = 1e-9;     // of scores, and relative to masses and weights, which are good to 1e-11

struct SampleArgs {  // mirrored by native_args.SampleArgs
    const void* logits;  // [rows, vocab]
    const uint64_t* seed;  // [rows], and so are the others
    const int64_t* position;
    const float* temperature;  // 0: greedy
    const int32_t* top_k;
    const float *top_p, *min_p;
    int32_t* tokens;
    int64_t rows, vocab;
    int32_t num_threads;
};

// See noise.py.
struct Noise {
    uint64_t key;

    static uint64_t element(uint64_t start, uint64_t index) {
        uint64_t x = start + (index + 1) * 0x9E3779B97F4A7C15u;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
        return x ^ (x >> 31);
    }
    Noise(uint64_t seed, int64_t position) : key(element(element(seed, 0), position)) {}
    double uniform(uint64_t counter) const { return ((double)(element(key, counter) >> 12) + 0.5) * 0x1p-52; }
    double gumbel(uint64_t counter) const { return -std::log(-std::log(uniform(counter))); }
    double tail_gumbel() const { return gumbel(1ull << 32); }
    double tail_uniform() const { return uniform((1ull << 32) + 1); }
};

static inline bool is_close(double a, double b, double scale) { return std::abs(a - b) <= CLOSE * scale; }

// One row at temperature > 0.
template <class T>
struct RowSampler {
    const T* x;
    const long vocab, top_k;
    const double temperature, top_p, min_p;
    const Noise noise;
    HeadFinder<T> finder;
    std::vector<uint64_t> keys;    // of the head, or of what top_k leaves of it
    std::vector<double> weights;   // of the same, relative to the largest
    double head_mass = 0;          // their sum
    std::vector<double> tail;      // [vocab] weights of the tail, 0 for what is in the head or excluded

    // The head's best token; whether it is known for sure; whether some of the tail may be kept.
    int32_t best = UNDECIDED;
    double best_score = 0;
    bool is_sure = false, has_tail = false;

    RowSampler(const SampleArgs& a, long row)
        : x((const T*)a.logits + row * a.vocab), vocab(a.vocab), top_k(a.top_k[row]), temperature(a.temperature[row]),
          top_p(a.top_p[row] < 1 ? a.top_p[row] : INFINITE), min_p(a.min_p[row]),
          noise(a.seed[row], a.position[row]), finder(x, vocab) {}

    double weight(float v) const { return std::exp(((double)v - finder.largest) / temperature); }

    int32_t sample() {
        if (!finder.find_bound()) return UNDECIDED;
        keys = finder.head();
        const long head_size = keys.size();
        bool is_all = head_size == vocab;
        if (top_k > 0 && top_k <= head_size) {  // ties with the k-th stay
            while (logit_of(keys.back()) < logit_of(keys[top_k - 1])) keys.pop_back();
            is_all = true;
        }
        weights.resize(keys.size());
        for (size_t i = 0; i < keys.size(); i++) head_mass += weights[i] = weight(logit_of(keys[i]));
        if (is_all) return head_decides(0, 0) ? best : UNDECIDED;

        double low, high;
        finder.tail_mass(head_size, temperature, &low, &high);
        if (head_decides(top_k > 0 ? 0 : low, high)) return best;
        const double mass = weigh_tail();
        return head_decides(mass, mass) ? best : is_sure && has_tail ? sample_with_tail(mass) : UNDECIDED;
    }

    // Whether the row's token is the head's best when the mass of the tail lies in [low, high].
    bool head_decides(double low, double high) {
        const double surely = top_p * (head_mass + low) * (1 - CLOSE), perhaps = top_p * (head_mass + high) * (1 + CLOSE);
        double preceding = 0, second = best_score = -INFINITE;
        size_t i = 0;
        for (; i < keys.size(); i++) {
            if (i && (preceding >= perhaps || weights[i] < min_p * (1 - CLOSE))) break;  // and so are all that follow
            const bool is_kept = !i || (preceding < surely && weights[i] >= min_p * (1 + CLOSE));
            const double logit = ((double)logit_of(keys[i]) - finder.largest) / temperature;
            const double score = logit + noise.gumbel(id_of(keys[i]));
            second = std::max(second, std::min(score, best_score));
            if (score > best_score) best_score = score, best = id_of(keys[i]), is_sure = is_kept;
            preceding += weights[i];
        }
        is_sure = is_sure && best_score > second + CLOSE;
        has_tail = high > 0 && i == keys.size() && preceding < perhaps && weights.back() >= min_p * (1 - CLOSE);
        return is_sure && (!has_tail || best_score > std::log(high) + noise.tail_gumbel() + CLOSE);
    }

    // Compute `tail` for what top_k leaves.  Returns its mass.
    double weigh_tail() {
        float lowest = -INFINITE;
        if (top_k > 0 && top_k < vocab) {
            std::vector<float> values(whole_vectors(vocab), -INFINITE);
            for (long i = 0; i < vocab; i++) values[i] = scalar(x + i);
            lowest = kth_largest(values.data(), values.size(), top_k, finder.largest);
        }
        tail.resize(whole_vectors(vocab));
        const double largest = finder.largest, scale = 1 / temperature;
        for (long i = 0; i < vocab; i += LANES) {
            const f32v v = load_or_lowest(x + i, vocab - i);
            const f32v inside = where((v < splat(finder.bound)) & (v >= splat(lowest)), v, splat(-INFINITE));
            for (int half = 0; half < 2; half++)
                store(&tail[i + half * LANES / 2], exp((widen(inside, half) - largest) * scale));
        }
        return sum(tail.data(), tail.size());
    }

    // When the tail, of this mass, has a part in the decision.
    int32_t sample_with_tail(double mass) {
        if (top_p < 1 && !keep_likeliest(top_p * (head_mass + mass) - head_mass)) return UNDECIDED;
        if (min_p > 0) {
            for (double& w : tail) {
                if (is_close(w, min_p, min_p)) return UNDECIDED;
                if (w < min_p) w = 0;
            }
        }
        mass = sum(tail.data(), tail.size());
        const double score = mass > 0 ? std::log(mass) + noise.tail_gumbel() : -INFINITE;
        if (is_close(score, best_score, 1)) return UNDECIDED;
        return score < best_score ? best : token_at(noise.tail_uniform() * mass, mass);
    }

    // Of the tail keep those tokens that are preceded by less than this mass of likelier ones, or equal ones of
    // lower id.  False if that hangs on rounding.
    bool keep_likeliest(double wanted) {
        constexpr int BINS = 2048;
        constexpr float RANGE = 20;  // of logits at temperature 1; less likely ones share a bin
        const float scale = BINS / RANGE / (float)temperature;
        auto bin_of = [&](long id) {
            return (int)std::min(BINS - 1.0f, (finder.bound - scalar(x + id)) * scale);
        };
        std::vector<double> in_bin(BINS);
        for (long i = 0; i < vocab; i++)
            if (tail[i] > 0) in_bin[bin_of(i)] += tail[i];
        int last = 0;
        double preceding = 0;
        while (last < BINS - 1 && preceding + in_bin[last] < wanted) preceding += in_bin[last++];
        std::vector<uint64_t> open;  // the tokens of the bin where it ends
        for (long i = 0; i < vocab; i++) {
            if (!(tail[i] > 0)) continue;
            const int bin = bin_of(i);
            if (bin == last) open.push_back(sort_key(scalar(x + i), i));
            if (bin > last) tail[i] = 0;
        }
        std::sort(open.begin(), open.end());
        bool is_clear = !is_close(preceding, wanted, 1 + head_mass);
        for (uint64_t key : open) {
            double& w = tail[id_of(key)];
            const bool is_kept = preceding < wanted;
            preceding += w;
            if (!is_kept) w = 0;
            is_clear = is_clear && !is_close(preceding, wanted, head_mass + preceding);
        }
        return is_clear;
    }

    // The token of the tail in whose part of the mass, in the order of ids, the target lies.
    int32_t token_at(double target, double mass) const {
        constexpr long STRIDE = 16 * LANES;
        double preceding = 0;
        long i = 0;
        for (double part; i + STRIDE < vocab; i += STRIDE, preceding += part)
            if (preceding + (part = sum(&tail[i], STRIDE)) > target) break;
        for (; i < vocab; preceding += tail[i++])
            if (preceding + tail[i] > target) break;
        if (i == vocab || is_close(preceding, target, mass) || is_close(preceding + tail[i], target, mass)) return UNDECIDED;
        return (int32_t)i;
    }
};

template <class T>
static int32_t sample(const SampleArgs& a, long row) {
    if (a.temperature[row] == 0) return (int32_t)argmax((const T*)a.logits + row * a.vocab, a.vocab);
    return RowSampler<T>(a, row).sample();
}

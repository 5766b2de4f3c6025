// Sampled tokens of rows of logits: those of sampling_rule.py.
//
// A close call is left UNDECIDED, which is rare, and goes by the rule as it is written down.
#pragma once

#include "native_rows.h"
#include "native_tails.h"

constexpr int32_t UNDECIDED = -1;  // as in sampler.py

struct SampleArgs {  // mirrored by native_args.SampleArgs
    const void* logits;       // [rows, columns]
    const int64_t* token_of;  // [columns] ascending, or null if the columns are the whole vocabulary
    const int32_t* class_of;  // [columns] see HeadFinder, or null
    const uint64_t* seed;     // [rows], and so are the others
    const int64_t* position;
    const float* temperature;  // 0: greedy
    const int32_t* top_k;
    const float *top_p, *min_p;
    int32_t* tokens;
    int64_t rows, columns, vocab;
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

// One row at temperature > 0.
template <class T>
struct RowSampler {
    const SampleArgs& args;
    const T* x;  // [columns]
    const long columns, top_k;
    const double temperature, top_p, min_p;
    const Noise noise;
    HeadFinder<T> finder;
    std::vector<uint64_t> keys;    // of the head, or of what top_k leaves of it
    std::vector<double> logits;    // of the same, relative to the largest and divided by the temperature
    std::vector<double> weights;   // their exponentials
    double head_mass = 0;          // the sum of these

    // The head's best token; whether it is known for sure; whether some of the tail may be kept.
    int32_t best = UNDECIDED;
    double best_score = 0;
    bool is_sure = false, has_tail = false;

    RowSampler(const SampleArgs& a, long row)
        : args(a), x((const T*)a.logits + row * a.columns), columns(a.columns), top_k(a.top_k[row]),
          temperature(a.temperature[row]), top_p(a.top_p[row] < 1 ? a.top_p[row] : INFINITE), min_p(a.min_p[row]),
          noise(a.seed[row], a.position[row]), finder(x, columns, a.vocab) {}

    int32_t token_of(long column) const { return (int32_t)(args.token_of ? args.token_of[column] : column); }

    int32_t sample() {
        if (!finder.find_bound(args.class_of)) return UNDECIDED;
        keys = finder.head();
        const long head_size = keys.size();
        bool is_all = head_size == columns;
        if (top_k > 0 || top_p < 1 || min_p > 0) std::sort(keys.begin(), keys.end());  // else any order will do
        if (top_k > 0 && top_k <= head_size) {  // ties with the k-th stay
            while (logit_of(keys.back()) < logit_of(keys[top_k - 1])) keys.pop_back();
            is_all = true;
        }
        weigh_head();
        if (is_all) return head_decides(0, 0) ? best : UNDECIDED;

        double low, high;
        finder.tail_mass(head_size, temperature, &low, &high);
        if (head_decides(top_k > 0 ? 0 : low, high)) return best;
        Tail<T> tail(finder, temperature, top_k);
        const double mass = tail.mass();
        return head_decides(mass, mass) ? best : is_sure && has_tail ? sample_with(tail, mass) : UNDECIDED;
    }

    void weigh_head() {
        const long count = keys.size(), room = whole_vectors(count);
        logits.assign(room, -INFINITE), weights.resize(room);
        for (long i = 0; i < count; i++) logits[i] = ((double)logit_of(keys[i]) - finder.largest) / temperature;
        for (long i = 0; i < room; i += LANES / 2) store(&weights[i], exp(load(&logits[i])));
        head_mass = sum(weights.data(), room);
    }

    // Whether the row's token is the head's best when the mass of the tail lies in [low, high].
    bool head_decides(double low, double high) {
        const double surely = top_p * (head_mass + low) * (1 - CLOSE);
        const double perhaps = top_p * (head_mass + high) * (1 + CLOSE);
        const double smallest = weights[keys.size() - 1];
        double preceding = 0, second = best_score = -INFINITE;
        size_t i = 0;
        for (; i < keys.size(); i++) {
            if (i && (preceding >= perhaps || weights[i] < min_p * (1 - CLOSE))) break;  // and so are all that follow
            const bool is_kept = !i || (preceding < surely && weights[i] >= min_p * (1 + CLOSE));
            const int32_t token = token_of(column_of(keys[i]));
            const double score = logits[i] + noise.gumbel(token);
            second = std::max(second, std::min(score, best_score));
            if (score > best_score) best_score = score, best = token, is_sure = is_kept;
            preceding += weights[i];
        }
        is_sure = is_sure && best_score > second + CLOSE;
        has_tail = high > 0 && i == keys.size() && preceding < perhaps && smallest >= min_p * (1 - CLOSE);
        high = std::min(high, perhaps - preceding + smallest);  // no token below the head weighs more than that
        return is_sure && (!has_tail || best_score > std::log(high) + noise.tail_gumbel() + CLOSE);
    }

    // When the tail, of this mass, has a part in the decision.
    int32_t sample_with(Tail<T>& tail, double mass) {
        const double total = head_mass + mass;
        if (top_p < 1 && !tail.keep_likeliest(top_p * total - head_mass, total)) return UNDECIDED;
        if (min_p > 0 && !tail.keep_heaviest(min_p)) return UNDECIDED;
        mass = tail.mass();
        const double score = mass > 0 ? std::log(mass) + noise.tail_gumbel() : -INFINITE;
        if (is_close(score, best_score, 1)) return UNDECIDED;
        if (score < best_score) return best;
        const long column = tail.column_at(noise.tail_uniform() * mass, mass);
        return column < 0 ? UNDECIDED : token_of(column);
    }
};

template <class T>
static int32_t sample(const SampleArgs& a, long row) {
    RowSampler<T> op(a, row);
    return op.temperature == 0 ? op.token_of(argmax(op.x, a.columns)) : op.sample();
}

// The decoder layers of a llama-like model by one team of threads, without a return to Python between kernels.
//
// The kernels are those that are also called one by one, so the bits are the same.
#pragma once

#include <omp.h>
#include <time.h>

#include <map>

#include "native_attend.h"
#include "native_linear.h"
#include "native_rows.h"

struct LayerArgs {  // mirrored by native_args.LayerArgs
    LinearArgs qkv, attention_out, gate_up, down;  // all but x, out and rows
    const bf16 *input_norm, *post_norm;            // [hidden_size]
    const bf16 *query_norm, *key_norm;             // [head_dim] or null
    bf16 *key_cache, *value_cache;
    int64_t sliding_window;
};

struct LayersArgs {  // mirrored by native_args.LayersArgs
    const LayerArgs* layers;
    AttentionArgs attention;  // all but query, out, the caches and sliding_window
    RopeArgs rope;            // all but qkv, the caches and norms
    bf16 *hidden, *delta;     // [num_tokens, hidden_size] the residual stream, and what is still to be added to it
    bf16 *qkv, *gate_up;  // scratch: [num_tokens, query, key and value heads], [num_tokens, 2 * inter]
    bf16 *normed, *attended, *activated;  // scratch, the inputs of linear layers in the order of tiles
    double* seconds;                      // [2] in linear layers and attention, added up; or null
    int64_t num_layers, num_tokens, hidden_size, attended_size, inter;
    int32_t num_threads;
    float eps;
};

#if defined(ANGELSPEC_LINEAR)

constexpr long ROWS_TO_OWN = 128;  // of each thread

// Adds the time since the last call to one of a few sums.
struct Clock {
    double* seconds;
    double last = now();

    static double now() {
        timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec + t.tv_nsec * 1e-9;
    }
    void lap(int which) {
        if (!seconds) return;
        const double time = now();
        if (which >= 0) seconds[which] += time - last;
        last = time;
    }
};

template <class Tile>
struct LayersInTeam {
    using Op = Attention<bf16, Tile>;

    const LayersArgs& args;
    Clock clock;
    const Rows<bf16> normed = Rows<bf16>::tiled(args.normed, args.hidden_size);
    const Rows<bf16> attended = Rows<bf16>::tiled(args.attended, args.attended_size);
    const Rows<bf16> activated = Rows<bf16>::tiled(args.activated, args.inter);

    // Whether a thread keeps to its rows between two attentions, instead of sharing the outputs of every product: its
    // rows stay in its cache and it waits for nobody, but every thread reads all weights.
    const bool own_rows = args.num_tokens >= ROWS_TO_OWN * omp_get_num_threads();

    template <class Body>
    void each_token(Body body) const {
        const Share rows = Share::of(args.num_tokens, own_rows ? ROWS : 1);
        for (long r = rows.begin; r < rows.end; r++) body(r);
        if (!own_rows) {
#pragma omp barrier
        }
    }

    void norm(const bf16* weight) const {
        const long n = args.hidden_size;
        each_token([&](long r) {
            rms_norm_row(args.delta + r * n, args.hidden + r * n, weight, normed.at(r, 0), n, args.eps, normed.step);
        });
    }

    void product(LinearArgs linear, const Inputs& x, bf16* out, const Rows<bf16>* activated = nullptr) {
        linear.out = out, linear.rows = args.num_tokens;
        clock.lap(-1);
        own_rows ? linear_of_own_rows(linear, x, activated) : linear_in_team(linear, x, activated);
        clock.lap(0);
    }

    void attention(const LayerArgs& layer, const AttentionArgs& attention, const AttentionPlan& plan) {
        RopeArgs rope = args.rope;
        rope.qkv = args.qkv, rope.key_cache = layer.key_cache, rope.value_cache = layer.value_cache;
        rope.query_norm = layer.query_norm, rope.key_norm = layer.key_norm;
        each_token([&](long t) { rope_token<bf16>(rope, t); });
        if (own_rows) {
#pragma omp barrier
        }
        clock.lap(-1);
        attend_in_team(Op(attention, attended), plan, args.num_threads);
        clock.lap(1);
    }

    void run(const LayerArgs& layer, const AttentionArgs& arguments, const AttentionPlan& plan) {
        norm(layer.input_norm);
        product(layer.qkv, normed, args.qkv);
        attention(layer, arguments, plan);
        product(layer.attention_out, attended, args.delta);
        norm(layer.post_norm);
        if (args.num_tokens > ROWS) {
            product(layer.gate_up, normed, nullptr, &activated);
        } else {  // few rows: what counts is that the weights are read in order
            product(layer.gate_up, normed, args.gate_up);
            in_team(args.num_tokens * parts(args.inter),
                    [&](long i) { silu_and_mul(args.gate_up, activated, args.inter, i); });
        }
        product(layer.down, activated, args.delta);
    }
};

// hidden becomes hidden + delta + the attention of every layer and the MLP of all but the last, whose is in delta.
template <class Tile>
static void run_layers(const LayersArgs& args) {
    auto arguments = [&](const LayerArgs& layer) {
        AttentionArgs a = args.attention;
        a.query = args.qkv, a.out = args.attended, a.sliding_window = layer.sliding_window;
        a.key_cache = layer.key_cache, a.value_cache = layer.value_cache;
        return a;
    };
    const Rows<bf16> attended = Rows<bf16>::tiled(args.attended, args.attended_size);
    clear_padding(args.attention, attended);
    std::map<int64_t, AttentionPlan> plans;  // by sliding window
    for (long i = 0; i < args.num_layers; i++) {
        const AttentionArgs a = arguments(args.layers[i]);
        const Attention<bf16, Tile> op(a, attended);
        plans.try_emplace(a.sliding_window, op, args.num_threads);
    }
#pragma omp parallel num_threads(args.num_threads)
    {
        LayersInTeam<Tile> team{args, {omp_get_thread_num() ? nullptr : args.seconds}};
        for (long i = 0; i < args.num_layers; i++) {
            const LayerArgs& layer = args.layers[i];
            team.run(layer, arguments(layer), plans.at(layer.sliding_window));
        }
    }
}
#endif

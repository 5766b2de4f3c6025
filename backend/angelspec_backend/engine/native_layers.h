// A forward pass of a llama-like model by one team of threads, without a return to Python between kernels: between two
// passes over the weights nothing of Python is left in the caches.
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

struct ForwardArgs {  // mirrored by native_args.ForwardArgs
    const LayerArgs* layers;
    LinearArgs head;          // all but x, out and rows
    AttentionArgs attention;  // all but query, out, the caches and sliding_window
    RopeArgs rope;            // all but qkv, the caches and norms
    const int64_t* token_ids;     // [num_tokens]
    const bf16* embedding;        // [vocab_size, hidden_size]
    const bf16* final_norm;       // [hidden_size]
    const int64_t* logits_index;  // [num_logits] the tokens whose logits are wanted
    bf16* logits;                 // [num_logits, vocab_size]
    const int64_t* taps;          // [num_taps] ascending, layers whose outputs are wanted
    bf16* tapped;                 // [num_taps, num_tokens, hidden_size]
    // Scratch, in whole blocks of rows: the residual stream and what is still to be added to it, [num_tokens, hidden_size];
    // queries, keys and values; the inputs of linear layers in the order of tiles.
    bf16 *hidden, *delta, *qkv, *normed, *attended, *activated;
    double* seconds;  // [2] in linear layers and attention, added up; or null
    int64_t num_layers, num_tokens, num_logits, num_taps, hidden_size, attended_size, inter;
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
struct ForwardInTeam {
    using Op = Attention<bf16, Tile>;

    const ForwardArgs& args;
    Clock clock;
    const Rows<bf16> normed = Rows<bf16>::tiled(args.normed, args.hidden_size);
    const Rows<bf16> attended = Rows<bf16>::tiled(args.attended, args.attended_size);
    const Rows<bf16> activated = Rows<bf16>::tiled(args.activated, args.inter);
    const Rows<bf16> delta = Rows<bf16>::row_major(args.delta, args.hidden_size);

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

    void embed() const {
        const long n = args.hidden_size;
        each_token([&](long r) {
            memcpy(args.hidden + r * n, args.embedding + args.token_ids[r] * n, n * sizeof(bf16));
            memset(args.delta + r * n, 0, n * sizeof(bf16));
        });
    }

    // The output of a layer: the residual stream, with what is still to be added.
    void tap(bf16* out) const {
        const long n = args.hidden_size;
        each_token([&](long r) {
            const bf16 *x = args.hidden + r * n, *y = args.delta + r * n;
            for (long i = 0; i < n; i += LANES) store(out + r * n + i, load(x + i, n - i) + load(y + i, n - i), n - i);
        });
    }

    void logits() {
        const long n = args.hidden_size;
#pragma omp barrier
        in_team(args.num_logits, [&](long i) {
            const long r = args.logits_index[i];
            rms_norm_row(args.delta + r * n, args.hidden + r * n, args.final_norm, normed.at(i, 0), n, args.eps, normed.step);
        });
        LinearArgs head = args.head;
        head.rows = args.num_logits;
        clock.lap(-1);
        linear_in_team(head, normed, Rows<bf16>::row_major(args.logits, head.out_features));
        clock.lap(0);
    }

    void product(LinearArgs linear, const Inputs& x, const Rows<bf16>& out) {
        linear.rows = args.num_tokens;
        clock.lap(-1);
        own_rows ? linear_of_own_rows(linear, x, out) : linear_in_team(linear, x, out);
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
        product(layer.qkv, normed, Rows<bf16>::row_major(args.qkv, layer.qkv.out_features));
        attention(layer, arguments, plan);
        product(layer.attention_out, attended, delta);
        norm(layer.post_norm);
        product(layer.gate_up, normed, activated);
        product(layer.down, activated, delta);
    }
};

template <class Tile>
static void forward(const ForwardArgs& args) {
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
        ForwardInTeam<Tile> team{args, {omp_get_thread_num() ? nullptr : args.seconds}};
        team.embed();
        for (long i = 0, tap = 0; i < args.num_layers; i++) {
            const LayerArgs& layer = args.layers[i];
            team.run(layer, arguments(layer), plans.at(layer.sliding_window));
            if (tap < args.num_taps && args.taps[tap] == i) team.tap(args.tapped + tap++ * args.num_tokens * args.hidden_size);
        }
        if (args.num_logits) team.logits();
    }
}
#endif

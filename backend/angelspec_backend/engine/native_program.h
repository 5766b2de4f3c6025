// A list of kernels, run by one team of threads without a return to Python between them.
//
// The kernels are those that are also called one by one, so the bits are the same.
#pragma once

#include "native_attend.h"
#include "native_linear.h"
#include "native_rows.h"

enum OpKind { OP_ROWS, OP_MIX, OP_LINEAR, OP_ROPE, OP_ATTENTION, OP_SILU, OP_ARGMAX };  // mirrored by program.KINDS

struct Op {  // mirrored by native_args.Op
    int64_t kind;
    const int64_t* rows;  // how many there are; with none nothing is done
    const void* args;     // of the kind
};

// Copies, adds and norms rows.  x of row r is x[index[r]]; residual[r] becomes the sum of both; out[r] is its norm.
struct RowsArgs {  // mirrored by native_args.RowsArgs
    const bf16* x;
    const int64_t* index;    // null: r itself
    const int64_t* nonzero;  // where it is 0, out is; or null
    bf16* residual;          // [rows, n] or null: x alone
    const bf16* weight;      // [n] of the norm; null: none
    bf16* out;               // null: only the sum is wanted
    int64_t x_stride, out_stride, n;
    float eps;
};

// out[r] = the sum of weight[k] * x[r][k].
struct MixArgs {  // mirrored by native_args.MixArgs
    const bf16* x;        // [rows, count, n]
    const float* weight;  // [count]
    bf16* out;            // [rows, n]
    int64_t count, n;
};

struct SiluArgs {  // mirrored by native_args.SiluArgs
    const bf16* gate_up;  // [rows, 2 * inter]
    bf16* out;            // [rows, inter]
    int64_t inter;
};

struct ArgmaxArgs {  // mirrored by native_args.ArgmaxArgs
    const bf16* logits;  // [rows, n]
    int32_t* out;        // [rows] the likeliest
    float* probability;  // [rows] of it
    int64_t n;
};

#if defined(ANGELSPEC_LINEAR)

static void run_rows(const RowsArgs& a, long r) {
    bf16* out = a.out + r * a.out_stride;
    if (a.nonzero && !a.nonzero[r]) {
        memset(out, 0, a.n * sizeof(bf16));
        return;
    }
    const bf16* x = a.x + (a.index ? a.index[r] : r) * a.x_stride;
    bf16* residual = a.residual ? a.residual + r * a.n : nullptr;
    if (a.weight) return rms_norm_row(x, residual, a.weight, out, a.n, a.eps);
    if (residual)
        for (long i = 0; i < a.n; i += LANES)
            store(residual + i, load(x + i, a.n - i) + load(residual + i, a.n - i), a.n - i);
    if (a.out) memcpy(out, residual ? residual : x, a.n * sizeof(bf16));
}

static void mix(const MixArgs& a, long r) {
    const bf16* x = a.x + r * a.count * a.n;
    for (long i = 0; i < a.n; i += LANES) {
        f32v sum = {};
        for (long k = 0; k < a.count; k++) sum = fma(splat(a.weight[k]), load(x + k * a.n + i, a.n - i), sum);
        store(a.out + r * a.n + i, sum, a.n - i);
    }
}

// What every thread of a team does; all of it is done when they leave.
template <class Tile>
static void run_in_team(const Op& op, const AttentionPlan* plan, int num_threads) {
    const long rows = *op.rows;
    switch (op.kind) {
        case OP_ROWS: {
            const RowsArgs& a = *(const RowsArgs*)op.args;
            return in_team(rows, [&](long r) { run_rows(a, r); });
        }
        case OP_MIX: {
            const MixArgs& a = *(const MixArgs*)op.args;
            return in_team(rows, [&](long r) { mix(a, r); });
        }
        case OP_LINEAR: {
            LinearArgs a = *(const LinearArgs*)op.args;
            a.rows = rows;
            return linear_in_team(a);
        }
        case OP_ROPE: {
            const RopeArgs& a = *(const RopeArgs*)op.args;
            return in_team(rows, [&](long r) { rope_token<bf16>(a, r); });
        }
        case OP_ATTENTION: {
            AttentionArgs a = *(const AttentionArgs*)op.args;
            a.num_rows = rows;
            return attend_in_team(Attention<bf16, Tile>(a), *plan, num_threads);
        }
        case OP_SILU: {
            const SiluArgs& a = *(const SiluArgs*)op.args;
            return in_team(rows * parts(a.inter), [&](long i) { silu_and_mul(a.gate_up, a.out, a.inter, i); });
        }
        case OP_ARGMAX: {
            const ArgmaxArgs& a = *(const ArgmaxArgs*)op.args;
            return in_team(rows,
                           [&](long r) { find_likeliest(a.logits + r * a.n, a.n, a.out + r, a.probability + r); });
        }
    }
}

template <class Tile>
static void run_program(const Op* ops, long count, int num_threads) {
    std::vector<AttentionPlan> plans;
    for (long i = 0; i < count; i++)
        if (ops[i].kind == OP_ATTENTION) {
            AttentionArgs a = *(const AttentionArgs*)ops[i].args;
            a.num_rows = *ops[i].rows;
            plans.emplace_back(Attention<bf16, Tile>(a), num_threads);
        }
#pragma omp parallel num_threads(num_threads)
    for (long i = 0, plan = 0; i < count; i++) {
        if (*ops[i].rows) run_in_team<Tile>(ops[i], plans.data() + plan, num_threads);
        plan += ops[i].kind == OP_ATTENTION;
    }
}
#endif

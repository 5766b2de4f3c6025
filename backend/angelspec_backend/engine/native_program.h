// A list of kernels, run by one team of threads without a return to Python between them.
//
// The kernels are those that are also called one by one, so the bits are the same.
#pragma once

#include "native_attend.h"
#include "native_linear.h"
#include "native_rows.h"

enum OpKind { OP_ROWS, OP_MIX, OP_LINEAR, OP_ROPE, OP_ATTENTION, OP_ARGMAX, OP_CUT };  // as program.KINDS

struct Op {  // mirrored by native_args.Op
    int64_t kind;
    const int64_t* rows;  // how many there are; with none nothing is done, but for OP_CUT
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

struct ArgmaxArgs {  // mirrored by native_args.ArgmaxArgs
    const bf16* logits;   // [rows, n]
    const int64_t* names; // [n] what is put out for each column; null: its number
    int64_t* out;         // [rows] the likeliest
    float* probability;   // [rows] of it
    int64_t n;
};

// Lowers the number of the next rows: to none, if nothing is left, or behind the last that is likely enough.
struct CutArgs {  // mirrored by native_args.CutArgs
    const float* probability;  // [rows] of the row's last step
    const float* before;       // [rows] of its steps before, multiplied; null: there are none
    float* product;            // [rows] of both
    const float* least;        // [rows] what the product must reach
    int64_t* next;
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

static void find_likeliest(const ArgmaxArgs& a, long r) {
    const bf16* x = a.logits + r * a.n;
    const long best = argmax(x, a.n);
    a.out[r] = a.names ? a.names[best] : best;
    a.probability[r] = probability_of(load(x + best, 1)[0], x, a.n);
}

static void cut(const CutArgs& a, long rows) {
    long end = 0;
    for (long r = 0; r < rows; r++) {
        a.product[r] = (a.before ? a.before[r] : 1) * a.probability[r];
        if (r < *a.next && a.product[r] >= a.least[r]) end = r + 1;
    }
    *a.next = end;
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
        case OP_ARGMAX: {
            const ArgmaxArgs& a = *(const ArgmaxArgs*)op.args;
            return in_team(rows, [&](long r) { find_likeliest(a, r); });
        }
        case OP_CUT: {
#pragma omp single
            cut(*(const CutArgs*)op.args, rows);
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
        if (*ops[i].rows || ops[i].kind == OP_CUT) run_in_team<Tile>(ops[i], plans.data() + plan, num_threads);
        plan += ops[i].kind == OP_ATTENTION;
    }
}
#endif

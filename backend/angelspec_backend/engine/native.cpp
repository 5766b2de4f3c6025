// The engine's CPU kernels, as plain C functions.  Every row is computed by itself, in a fixed order.
//
// dtype: 0 = fp32, 1 = bf16.  bf16 is widened, computed in fp32, and rounded where the Hugging Face modules
// round.  Matrices are row-major; a stride is in elements.
#include "native_attend.h"
#include "native_layers.h"
#include "native_linear.h"
#include "native_program.h"
#include "native_rows.h"
#include "native_sampling.h"

// Elements below which one thread does it alone: waking sleeping threads takes tens of microseconds.
constexpr long PARALLEL_NORM = 1 << 18, PARALLEL_ROPE = 1 << 16, PARALLEL_SILU = 1 << 16;

template <class T>
static void rms_norm_rows(T* x, T* residual, const T* weight, T* out, long rows, long n, float eps,
                          int num_threads) {
    for_each(rows, rows * n >= PARALLEL_NORM, num_threads, [=](long r) {
        rms_norm_row(x + r * n, residual ? residual + r * n : nullptr, weight, out + r * n, n, eps);
    });
}

template <class T>
static void rope_tokens(const RopeArgs& a) {
    long size = (a.num_heads + 2L * a.num_kv_heads) * a.head_dim;
    for_each(a.num_tokens, a.num_tokens * size >= PARALLEL_ROPE, a.num_threads, [&](long t) { rope_token<T>(a, t); });
}

template <class T>
static void silu_and_mul_rows(const T* gate_up, T* out, long rows, long inter, int num_threads) {
    for_each(rows * parts(inter), rows * inter >= PARALLEL_SILU, num_threads,
             [=](long i) { silu_and_mul(gate_up, out, inter, i); });
}

template <class T>
static void find_likeliest(const T* logits, int32_t* out, float* probability, long r, long n) {
    const T* x = logits + r * n;
    out[r] = argmax(x, n);
    if (probability) probability[r] = probability_of(load(x + out[r], 1)[0], x, n);
}

extern "C" {

void angelspec_paged_attention(const AttentionArgs* args, int dtype) {
    if (!dtype) return attend<float, FmaTile<float>>(*args);
#if defined(__AMX_BF16__)
    if (amx_allowed()) return attend<bf16, AmxTile>(*args);
#endif
    attend<bf16, FmaTile<bf16>>(*args);
}

// x, out: [rows, n]; residual: [rows, n] or null, becomes residual + x; weight: [n]
void angelspec_rms_norm(void* x, void* residual, const void* weight, void* out, long rows, long n, float eps,
                        int num_threads, int dtype) {
    if (dtype)
        rms_norm_rows((bf16*)x, (bf16*)residual, (const bf16*)weight, (bf16*)out, rows, n, eps, num_threads);
    else
        rms_norm_rows((float*)x, (float*)residual, (const float*)weight, (float*)out, rows, n, eps, num_threads);
}

void angelspec_rope_and_cache(const RopeArgs* args, int dtype) {
    dtype ? rope_tokens<bf16>(*args) : rope_tokens<float>(*args);
}

// gate_up: [rows, 2 * inter] -> out: [rows, inter]
void angelspec_silu_and_mul(const void* gate_up, void* out, long rows, long inter, int num_threads, int dtype) {
    if (dtype)
        silu_and_mul_rows((const bf16*)gate_up, (bf16*)out, rows, inter, num_threads);
    else
        silu_and_mul_rows((const float*)gate_up, (float*)out, rows, inter, num_threads);
}

// logits: [rows, n] -> out: [rows] the likeliest, probability: [rows] of it, or null
void angelspec_argmax(const void* logits, int32_t* out, float* probability, long rows, long n, int num_threads,
                      int dtype) {
    for_each(rows, rows * n >= PARALLEL_NORM, num_threads, [=](long r) {
        dtype ? find_likeliest((const bf16*)logits, out, probability, r, n)
              : find_likeliest((const float*)logits, out, probability, r, n);
    });
}

// One token per row; UNDECIDED where the caller has to sample by the rule itself.
void angelspec_sample(const SampleArgs* args, int dtype) {
    const SampleArgs& a = *args;
    auto sample_one = [&](long r) { a.tokens[r] = dtype ? sample<bf16>(a, r) : sample<float>(a, r); };
    if (a.rows * a.columns < PARALLEL_NORM) {
        for (long r = 0; r < a.rows; r++) sample_one(r);
        return;
    }
#pragma omp parallel for schedule(dynamic) num_threads(a.num_threads)
    for (long r = 0; r < a.rows; r++) sample_one(r);
}

// A forward pass of a llama-like model with bf16 weights.
void angelspec_forward(const ForwardArgs* args) {
#if defined(ANGELSPEC_LINEAR)
#if defined(__AMX_BF16__)
    if (amx_allowed()) return forward<AmxTile>(*args);
#endif
    forward<FmaTile<bf16>>(*args);
#endif
}

void angelspec_run(const Op* ops, long count, int num_threads) {
#if defined(ANGELSPEC_LINEAR)
#if defined(__AMX_BF16__)
    if (amx_allowed()) return run_program<AmxTile>(ops, count, num_threads);
#endif
    run_program<FmaTile<bf16>>(ops, count, num_threads);
#endif
}

int angelspec_linear_kernel() { return best_linear_kernel(); }

void angelspec_linear(const LinearArgs* args) {
#if defined(ANGELSPEC_LINEAR)
    linear(*args);
#endif
}
}

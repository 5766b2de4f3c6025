// The engine's CPU kernels, as plain C functions.  Every row is computed by itself, in a fixed order.
//
// dtype: 0 = fp32, 1 = bf16.  bf16 is widened, computed in fp32, and rounded where the Hugging Face modules
// round.  Matrices are row-major; a stride is in elements.
#include "native_attention.h"
#include "native_linear.h"
#include "native_sampling.h"

// Elements below which one thread does it alone: waking sleeping threads takes tens of microseconds.
constexpr long PARALLEL_NORM = 1 << 18, PARALLEL_ROPE = 1 << 16, PARALLEL_SILU = 1 << 16;

template <class T>
static void rms_norm_row(T* x, T* residual, const T* weight, T* out, long n, float eps) {
    f32v squares = {};
    for (long i = 0; i < n; i += LANES) {
        f32v v = load(x + i, n - i);
        if (residual) {
            v = round_to<T>(v + load(residual + i, n - i));
            store(residual + i, v, n - i);
        }
        squares = fma(v, v, squares);
    }
    f32v scale = splat(1.0f / __builtin_sqrtf(sum_lanes(squares) / n + eps));
    const T* from = residual ? residual : x;
    for (long i = 0; i < n; i += LANES)
        store(out + i, load(weight + i, n - i) * round_to<T>(load(from + i, n - i) * scale), n - i);
}

struct RopeArgs {  // mirrored by native.RopeArgs
    void *qkv, *key_cache, *value_cache;
    const void *cos_sin, *query_norm, *key_norm;
    const int64_t *positions, *slot_mapping;
    int32_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    int32_t num_threads;
    float eps;
};

// Rotate the halves of one head: x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin, each step rounded to T.
template <class T>
static void rotate(T* x, const T* cos_sin, int half) {
    for (int i = 0; i < half; i += LANES) {
        long n = half - i;
        f32v a = load(x + i, n), b = load(x + half + i, n);
        f32v c = load(cos_sin + i, n), s = load(cos_sin + half + i, n);
        store(x + i, round_to<T>(a * c) - round_to<T>(b * s), n);
        store(x + half + i, round_to<T>(b * c) + round_to<T>(a * s), n);
    }
}

template <class T>
static void rope_token(const RopeArgs& a, long t) {
    long dim = a.head_dim, heads = a.num_heads, kv_heads = a.num_kv_heads;
    T* token = (T*)a.qkv + t * (heads + 2 * kv_heads) * dim;
    const T* cos_sin = (const T*)a.cos_sin + a.positions[t] * a.rotary_dim;
    long block = a.slot_mapping[t] / a.block_size, offset = a.slot_mapping[t] % a.block_size;
    for (long h = 0; h < heads + kv_heads; h++) {
        T* x = token + h * dim;
        const T* weight = (const T*)(h < heads ? a.query_norm : a.key_norm);
        if (weight) rms_norm_row<T>(x, nullptr, weight, x, dim, a.eps);
        rotate(x, cos_sin, a.rotary_dim / 2);
    }
    for (long h = 0; h < kv_heads; h++) {
        long at = ((block * kv_heads + h) * a.block_size + offset) * dim;
        memcpy((T*)a.key_cache + at, token + (heads + h) * dim, dim * sizeof(T));
        memcpy((T*)a.value_cache + at, token + (heads + kv_heads + h) * dim, dim * sizeof(T));
    }
}

template <class T>
static void silu_and_mul_part(const T* gate_up, T* out, long inter, long begin, long end) {
    for (long i = begin; i < end; i += LANES) {
        f32v gate = load(gate_up + i, end - i), up = load(gate_up + inter + i, end - i);
        f32v silu = round_to<T>(gate * reciprocal(splat(1.0f) + exp(-gate)));
        store(out + i, silu * up, end - i);
    }
}

// body(i) for 0 <= i < n, on several threads if there is enough to do: even an inactive region takes a while.
template <class Body>
static void for_each(long n, bool parallel, int num_threads, Body body) {
    if (parallel && num_threads > 1) {
#pragma omp parallel for num_threads(num_threads)
        for (long i = 0; i < n; i++) body(i);
    } else {
        for (long i = 0; i < n; i++) body(i);
    }
}

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
    const long part = 1024, parts = (inter + part - 1) / part;
    for_each(rows * parts, rows * inter >= PARALLEL_SILU, num_threads, [=](long i) {
        long r = i / parts, at = i % parts * part, end = at + part < inter ? at + part : inter;
        silu_and_mul_part(gate_up + r * 2 * inter, out + r * inter, inter, at, end);
    });
}

// The lowest index of the largest value; NaN counts as none.
template <class T>
static long argmax(const T* x, long n) {
    f32v tops = splat(-__builtin_inff());
    long i = 0;
    for (; i + LANES <= n; i += LANES) {
        f32v v = load(x + i);
        tops = v > tops ? v : tops;
    }
    float top;
    max_lanes<1>(&tops, &top);
    for (; i < n; i++) {
        float v = load(x + i, 1)[0];
        top = v > top ? v : top;
    }
    for (i = 0; i < n; i += LANES) {
        i32v hit = load(x + i, n - i) == splat(top);
        for (long j = 0; j < LANES && i + j < n; j++)
            if (hit[j]) return i + j;
    }
    return 0;
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

// logits: [rows, n] -> out: [rows]
void angelspec_argmax(const void* logits, int32_t* out, long rows, long n, int num_threads, int dtype) {
    for_each(rows, rows * n >= PARALLEL_NORM, num_threads, [=](long r) {
        out[r] = dtype ? argmax((const bf16*)logits + r * n, n) : argmax((const float*)logits + r * n, n);
    });
}

void angelspec_find_heads(const HeadArgs* args, int dtype) {
    const HeadArgs& a = *args;
    for_each(a.rows, a.rows * a.vocab >= PARALLEL_NORM, a.num_threads,
             [&](long r) { dtype ? find_head<bf16>(a, r) : find_head<float>(a, r); });
}

int angelspec_linear_kernel() { return best_linear_kernel(); }

void angelspec_linear(const LinearArgs* args) {
#if defined(ANGELSPEC_LINEAR)
    linear(*args);
#endif
}
}

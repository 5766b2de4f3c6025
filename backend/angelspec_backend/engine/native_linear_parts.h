// What a linear layer is made of: its arguments, its weights as its kernels read them, and what becomes of its sums.
#pragma once

#include "native_rows.h"

enum LinearKernel { LINEAR_NONE, LINEAR_AVX512, LINEAR_AMX };  // mirrored by native.LINEAR_KERNELS

struct LinearArgs {       // mirrored by native_args.LinearArgs
    const bf16* x;        // [rows, in_features], dense
    const void* weight;   // [blocks][steps][PANEL], bf16 or bytes as linear_native packs them
    const float* scale;   // [blocks][OUTPUTS], one per output, or null
    const bf16* bias;     // [blocks][OUTPUTS] or null
    bf16* out;            // [rows, out_features]
    int64_t rows, in_features, out_features;  // in_features: a multiple of STEP
    int32_t gated;        // not 0: a block is 16 gates and their 16 factors, of which silu(gate) * factor is put out
    int32_t weight_bits, kernel, num_threads;  // weight_bits: 8 or 16
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define ANGELSPEC_LINEAR 1

constexpr int OUTPUTS = 32;       // outputs computed together: two tiles of 16
constexpr long PANEL = STEP * OUTPUTS;  // weights in one step of a block of outputs

// The bytes of bf16(m) for the magnitudes 0 <= m < 128.
struct Bf16Bytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr Bf16Bytes() : low(), high() {
        for (int m = 1; m < 128; m++) {
            int e = 0;
            while (m >> (e + 1)) e++;
            int bits = ((127 + e) << 7) | ((m << (7 - e)) & 0x7f);
            low[m] = bits & 0xff;
            high[m] = bits >> 8;
        }
    }
};
constexpr Bf16Bytes BF16_BYTES;

// One step: [PANEL] bytes -> bf16 [2 tiles][16 pairs of inputs][16 outputs][2]
static inline void widen(const uint8_t* from, bf16* to) {
    const __m512i low0 = _mm512_load_si512(BF16_BYTES.low), low1 = _mm512_load_si512(BF16_BYTES.low + 64);
    const __m512i high0 = _mm512_load_si512(BF16_BYTES.high), high1 = _mm512_load_si512(BF16_BYTES.high + 64);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int i = 0; i < PANEL; i += 64) {
        __m512i code = _mm512_loadu_si512(from + i);
        _mm_prefetch((const char*)from + i + 2048, _MM_HINT_T0);
        __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
        __m512i high = _mm512_permutex2var_epi8(high0, code, high1);
        high = _mm512_or_si512(high, _mm512_and_si512(code, sign));
        _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
    }
}

// What becomes of the sums of a block of outputs: scaled, with the bias, rounded, stored; those of a gated layer activated.
struct Output {
    bool scaled, gated;
    __m512 scale[2], bias[2];
    uint32_t here;  // which of the 32 are outputs

    Output(const LinearArgs& a, long block) : scaled(a.scale || a.bias), gated(a.gated) {
        const long each = gated ? OUTPUTS / 2 : OUTPUTS, n = a.out_features - block * each;
        here = n >= OUTPUTS ? ~0u : (1u << n) - 1;
        for (int half = 0; half < 2; half++) {
            const long at = block * OUTPUTS + half * 16;
            scale[half] = a.scale ? _mm512_loadu_ps(a.scale + at) : _mm512_set1_ps(1);
            bias[half] = a.bias ? (__m512)load(a.bias + at) : _mm512_setzero_ps();
        }
    }

    // sums: [count][OUTPUTS]; to: the first row's, the next are `stride` apart.
    template <bool GATED>
    void put(const float* sums, bf16* to, long stride, long count) const {
        for (; count > 0; count--, sums += OUTPUTS, to += stride) {
            __m512 low = _mm512_load_ps(sums), high = _mm512_load_ps(sums + 16);
            if (scaled) low = _mm512_fmadd_ps(low, scale[0], bias[0]), high = _mm512_fmadd_ps(high, scale[1], bias[1]);
            if (GATED) {
                f32v gate = round_to<bf16>((f32v)low), factor = round_to<bf16>((f32v)high);
                _mm256_mask_storeu_epi16(to, here, (__m256i)narrow(silu_and_mul<bf16>(gate, factor)));
            } else {
                _mm512_mask_storeu_epi16(to, here, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            }
        }
    }
};

// The sums of a block of rows with a block of outputs, on their way to the output.
struct BlockSums {
    alignas(64) float sums[ROWS * OUTPUTS];
    bf16* to = nullptr;
    long stride = 0, count = 0, done = 0;  // rows stored

    // Store the next `some` rows.
    void finish(const Output& output, long some) {
        if (some > count - done) some = count - done;
        if (some <= 0) return;
        const float* from = sums + done * OUTPUTS;
        output.gated ? output.put<true>(from, to, stride, some) : output.put<false>(from, to, stride, some);
        to += some * stride, done += some;
    }
};

// The weights of a block of outputs are read step by step, two tiles [PANEL / 2].  `ready(k, end)` is called before step k
// is first used, of the steps until `end`.
struct WideWeights {  // bf16: from where they are; the memory is asked early
    const bf16* from;
    const bf16* step(long k) const { return from + k * PANEL; }
    void ready(long k, long) {
        for (long i = 0; i < PANEL; i += 32) _mm_prefetch((const char*)(step(k + 3) + i), _MM_HINT_T0);
    }
};

struct NarrowWeights {  // 8 bits: widened into a panel whose steps repeat after `ring`, a power of two
    const uint8_t* from;
    bf16* panel;
    long ring;
    const bf16* step(long k) const { return panel + (k & (ring - 1)) * PANEL; }
    void ready(long k, long end) {
        if (k >= end) return;
        widen(from + k * PANEL, panel + (k & (ring - 1)) * PANEL);
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
    }
};

// The weights of the next block of outputs, asked for while the later rows pass by those of this one, so that memory is
// read all the time.
struct NextWeights {
    const char *at, *end;
    long lines;  // of 64 bytes, per step

    // Behind those at `weight`; passes: of blocks of rows, each of so many steps.
    NextWeights(const void* weight, long bytes, long steps, long passes) {
        at = (const char*)weight + bytes, end = passes > 1 ? at + bytes : at;
        lines = passes > 1 ? (bytes / 64 / steps + passes - 2) / (passes - 1) : 0;
    }

    void ask() {
        for (long i = 0; i < lines && at < end; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};
#endif

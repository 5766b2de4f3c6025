// Linear layers with 8-bit weights: the weights widen to bf16 on their way, products and sums are those of bf16.
//
// An output is one sum over the inputs in ascending order, with a fixed instruction, whatever the number of
// rows; so a row does not depend on the rows beside it.  Two kernels: AMX tiles, and AVX-512 dot products
// where the CPU (or the kernel of the operating system) has no AMX.  Their sums round differently.
#pragma once

#include <cstdlib>

#include "native_amx.h"

enum Int8Kernel { INT8_NONE, INT8_AVX512, INT8_AMX };  // mirrored by native.INT8_KERNELS

struct Int8Args {         // mirrored by native.Int8Args
    const bf16* x;        // [rows, in_features], dense
    const uint8_t* weight;  // [blocks][steps][1024] in the order of linear_int8.pack, sign and magnitude
    const float* scale;   // [out_features], one per output
    const bf16* bias;     // [out_features] or null
    bf16* out;            // [rows, out_features]
    int64_t rows, in_features, out_features;  // in_features: a multiple of STEP
    int32_t kernel, num_threads;
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define ANGELSPEC_INT8 1

constexpr int STEP = 32;          // inputs in one step of the sum
constexpr int OUTPUTS = 32;       // outputs computed together: two tiles of 16
constexpr int ROWS = 32;          // rows that share one pass over the widened weights
constexpr long PANEL = STEP * OUTPUTS;  // weights in one step of a block of outputs
constexpr int RING = 4;           // widened steps kept when no later rows need them

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

// One step of a block: [PANEL] bytes -> bf16 [2 tiles][16 pairs of inputs][16 outputs][2]
static inline void widen_step(const uint8_t* from, bf16* to) {
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

// The sums of a block of rows with a block of outputs, on their way to the output.
struct Int8Sums {
    alignas(64) float sums[ROWS * OUTPUTS];
    long row = 0, count = 0, done = 0;  // rows stored

    // Scale, add the bias, round and store the rows until `end`, for the outputs from `output` on.
    void finish(const Int8Args& a, long output, long end) {
        const long n = a.out_features - output;  // OUTPUTS or more, or what is left
        const uint32_t here = n >= OUTPUTS ? ~0u : (1u << n) - 1;
        const __mmask16 masks[2] = {(__mmask16)here, (__mmask16)(here >> 16)};
        __m512 scale[2], bias[2] = {};
        for (int half = 0; half < 2; half++) {
            scale[half] = _mm512_maskz_loadu_ps(masks[half], a.scale + output + half * 16);
            if (!a.bias) continue;
            __m256i narrow = _mm256_maskz_loadu_epi16(masks[half], a.bias + output + half * 16);
            bias[half] = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
        }
        for (; done < end && done < count; done++) {
            const float* from = sums + done * OUTPUTS;
            __m512 low = _mm512_fmadd_ps(_mm512_load_ps(from), scale[0], bias[0]);
            __m512 high = _mm512_fmadd_ps(_mm512_load_ps(from + 16), scale[1], bias[1]);
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_mask_storeu_epi16(a.out + (row + done) * a.out_features + output, here, both);
        }
    }
};

// The sums of `count` rows with one block of outputs -> sums [count][OUTPUTS].  The weights of the block are
// widened into the panel if `fresh`, else they are there; its steps repeat after `ring`.
struct Int8Block {
    const Int8Args& args;
    const uint8_t* weight;
    bf16* panel;
    long ring, output;

    long steps() const { return args.in_features / STEP; }
    bf16* step(long k) const { return panel + k % ring * PANEL; }
    void widen(long k) const {
        if (k < steps()) widen_step(weight + k * PANEL, step(k));
    }

    template <int N>
    void dot(const bf16* x, bool fresh, float* sums) const {
        __m512 acc[N][2] = {};
        if (fresh) widen(0);
        for (long k = 0; k < steps(); k++) {
            if (fresh) widen(k + 1);
            const bf16* w = step(k);
            for (int pair = 0; pair < STEP / 2; pair++) {
                __m512bh a = (__m512bh)_mm512_load_si512(w + pair * 32);
                __m512bh b = (__m512bh)_mm512_load_si512(w + PANEL / 2 + pair * 32);
                for (int r = 0; r < N; r++) {
                    int32_t two;
                    memcpy(&two, x + r * args.in_features + k * STEP + 2 * pair, 4);
                    __m512bh v = (__m512bh)_mm512_set1_epi32(two);
                    acc[r][0] = _mm512_dpbf16_ps(acc[r][0], v, a);
                    acc[r][1] = _mm512_dpbf16_ps(acc[r][1], v, b);
                }
            }
        }
        for (int r = 0; r < N; r++)
            for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + r * OUTPUTS + half * 16, acc[r][half]);
    }

    void dots(const bf16* x, long count, bool fresh, float* sums) const {
        for (; count > 0; fresh = false) {
            long n = count >= 8 ? 8 : count >= 4 ? 4 : count >= 2 ? 2 : 1;
            n == 8 ? dot<8>(x, fresh, sums) : n == 4 ? dot<4>(x, fresh, sums)
                                          : n == 2 ? dot<2>(x, fresh, sums) : dot<1>(x, fresh, sums);
            x += n * args.in_features, sums += n * OUTPUTS, count -= n;
        }
    }

#if defined(__AMX_BF16__)
    template <bool SECOND>  // whether there are rows for a second tile
    void tiles(const bf16* x, bool fresh, float* sums, Int8Sums& earlier) const {
        const long stride = args.in_features * sizeof(bf16);
        _tile_zero(0);
        _tile_zero(1);
        if (SECOND) {
            _tile_zero(2);
            _tile_zero(3);
        }
        if (fresh) widen(0);
        for (long k = 0; k < steps(); k++, x += STEP) {
            if (fresh) widen(k + 1);
            earlier.finish(args, output, (k + 1) * ROWS / steps());  // spread, so that no store has to wait
            asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
            const bf16* w = step(k);
            _tile_loadd(4, x, stride);
            _tile_loadd(6, w, 64);
            _tile_loadd(7, w + PANEL / 2, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (SECOND) {
                _tile_loadd(5, x + TILE_ROWS * args.in_features, stride);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums, OUTPUTS * 4);
        _tile_stored(1, sums + 16, OUTPUTS * 4);
        if (SECOND) {
            _tile_stored(2, sums + TILE_ROWS * OUTPUTS, OUTPUTS * 4);
            _tile_stored(3, sums + TILE_ROWS * OUTPUTS + 16, OUTPUTS * 4);
        }
        asm volatile("" ::: "memory");
    }
#endif
};

static void int8_block(const Int8Args& a, long block, bf16* panel, long ring, long* configured) {
    Int8Sums buffers[2];
    Int8Block op{a, a.weight + block * (a.in_features / STEP) * PANEL, panel, ring, block * OUTPUTS};
    for (long row = 0, i = 0; row < a.rows; row += ROWS, i ^= 1) {
        long count = a.rows - row < ROWS ? a.rows - row : ROWS;
        const bf16* x = a.x + row * a.in_features;
        Int8Sums &now = buffers[i], &earlier = buffers[i ^ 1];
#if defined(__AMX_BF16__)
        if (a.kernel == INT8_AMX) {
            if (*configured != count) {
                const long first = count < TILE_ROWS ? count : TILE_ROWS, second = count - first;
                const long rows[8] = {first, first, second, second, first, second, 16, 16};
                configure_tiles(rows);
                *configured = count;
            }
            count > TILE_ROWS ? op.tiles<true>(x, row == 0, now.sums, earlier)
                              : op.tiles<false>(x, row == 0, now.sums, earlier);
        }
#endif
        if (a.kernel == INT8_AVX512) op.dots(x, count, row == 0, now.sums);
        earlier.finish(a, op.output, ROWS);
        now.row = row, now.count = count, now.done = 0;
    }
    for (Int8Sums& sums : buffers) sums.finish(a, op.output, ROWS);
}

static void int8_linear(const Int8Args& a) {
    const long blocks = (a.out_features + OUTPUTS - 1) / OUTPUTS, steps = a.in_features / STEP;
    // When no later rows read the widened weights again, few of them are kept.
    const bool once = a.kernel == INT8_AMX ? a.rows <= ROWS : a.rows <= 8 && (a.rows & (a.rows - 1)) == 0;
    const long ring = once && steps > RING ? RING : steps;
#pragma omp parallel num_threads(a.num_threads)
    {
        alignas(64) bf16 small[RING * PANEL];
        bf16* panel = ring <= RING ? small : (bf16*)aligned_alloc(64, ring * PANEL * sizeof(bf16));
        long configured = 0;
#pragma omp for schedule(static)
        for (long block = 0; block < blocks; block++) int8_block(a, block, panel, ring, &configured);
#if defined(__AMX_BF16__)
        if (configured) { _tile_release(); }
#endif
        if (panel != small) free(panel);
    }
}
#endif

static Int8Kernel best_int8_kernel() {
#if defined(ANGELSPEC_INT8)
    return amx_allowed() ? INT8_AMX : INT8_AVX512;
#else
    return INT8_NONE;
#endif
}

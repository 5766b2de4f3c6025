// Linear layers with weights of bf16, or of 8 bits that widen to bf16 on their way; products and sums are those of bf16.
//
// An output is one sum over the inputs in ascending order, with a fixed instruction, whatever the number of
// rows; so a row does not depend on the rows beside it.  Two kernels: AMX tiles, and AVX-512 dot products
// where the CPU (or the kernel of the operating system) has no AMX.  Their sums round differently.
#pragma once

#include <cstdlib>

#include "native_amx.h"

enum LinearKernel { LINEAR_NONE, LINEAR_AVX512, LINEAR_AMX };  // mirrored by native.LINEAR_KERNELS

struct LinearArgs {       // mirrored by native_args.LinearArgs
    const bf16* x;        // [rows, in_features], dense
    const void* weight;   // [blocks][steps][PANEL], bf16 or bytes as linear_native packs them
    const float* scale;   // [out_features], one per output, or null
    const bf16* bias;     // [out_features] or null
    bf16* out;            // [rows, out_features]
    int64_t rows, in_features, out_features;  // in_features: a multiple of STEP
    int32_t weight_bits, kernel, num_threads;  // weight_bits: 8 or 16
};

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define ANGELSPEC_LINEAR 1

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
struct BlockSums {
    alignas(64) float sums[ROWS * OUTPUTS];
    long row = 0, count = 0, done = 0;  // rows stored

    // Scale, add the bias, round and store the rows until `end`, for the outputs from `output` on.
    void finish(const LinearArgs& a, long output, long end) {
        const long n = a.out_features - output;  // OUTPUTS or more, or what is left
        const uint32_t here = n >= OUTPUTS ? ~0u : (1u << n) - 1;
        const __mmask16 masks[2] = {(__mmask16)here, (__mmask16)(here >> 16)};
        __m512 scale[2], bias[2] = {};
        for (int half = 0; half < 2; half++) {
            scale[half] = a.scale ? _mm512_maskz_loadu_ps(masks[half], a.scale + output + half * 16) : _mm512_set1_ps(1);
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

// Where a block's weights are read from, step by step; `ready(k)` is called before step k is first used.
struct WideWeights {  // bf16: from where they are; the memory is asked early
    const bf16* weight;
    const bf16* step(long k) const { return weight + k * PANEL; }
    void ready(long k) const {
        for (long i = 0; i < PANEL; i += 32) _mm_prefetch((const char*)(step(k + 3) + i), _MM_HINT_T0);
    }
};

struct NarrowWeights {  // 8 bits: widened into a panel whose steps repeat after `ring`
    const uint8_t* weight;
    bf16* panel;
    long ring, steps;
    const bf16* step(long k) const { return panel + k % ring * PANEL; }
    void ready(long k) const {
        if (k < steps) widen_step(weight + k * PANEL, panel + k % ring * PANEL);
    }
};

// The sums of `count` rows with one block of outputs -> sums [count][OUTPUTS].  `fresh`: the block's weights are
// used for the first time.
template <class Weights>
struct LinearBlock {
    const LinearArgs& args;
    Weights weights;
    long output;

    long steps() const { return args.in_features / STEP; }

    template <int N>
    void dot(const bf16* x, bool fresh, float* sums) const {
        __m512 acc[N][2] = {};
        if (fresh) weights.ready(0);
        for (long k = 0; k < steps(); k++) {
            if (fresh) weights.ready(k + 1);
            const bf16* w = weights.step(k);
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
    void tiles(const bf16* x, bool fresh, float* sums, BlockSums& earlier) const {
        const long stride = args.in_features * sizeof(bf16);
        _tile_zero(0);
        _tile_zero(1);
        if (SECOND) {
            _tile_zero(2);
            _tile_zero(3);
        }
        if (fresh) weights.ready(0);
        for (long k = 0; k < steps(); k++, x += STEP) {
            if (fresh) weights.ready(k + 1);
            earlier.finish(args, output, (k + 1) * ROWS / steps());  // spread, so that no store has to wait
            asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
            const bf16* w = weights.step(k);
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

template <class Weights>
static void linear_block(const LinearArgs& a, long block, Weights weights, BlockSums buffers[2], long* configured) {
    LinearBlock<Weights> op{a, weights, block * OUTPUTS};
    for (long row = 0, i = 0; row < a.rows; row += ROWS, i ^= 1) {
        long count = a.rows - row < ROWS ? a.rows - row : ROWS;
        const bf16* x = a.x + row * a.in_features;
        BlockSums &now = buffers[i], &earlier = buffers[i ^ 1];
#if defined(__AMX_BF16__)
        if (a.kernel == LINEAR_AMX) {
            if (*configured != count) {
                const long first = count < TILE_ROWS ? count : TILE_ROWS, second = count - first;
                const long rows[8] = {first, first, second, second, first, second, 16, 16};
                configure_tiles(rows);
                *configured = count;
            }
            count > TILE_ROWS ? op.template tiles<true>(x, row == 0, now.sums, earlier)
                              : op.template tiles<false>(x, row == 0, now.sums, earlier);
        }
#endif
        if (a.kernel == LINEAR_AVX512) op.dots(x, count, row == 0, now.sums);
        earlier.finish(a, op.output, ROWS);
        now.row = row, now.count = count, now.done = 0;
    }
    for (int i = 0; i < 2; i++) buffers[i].finish(a, op.output, ROWS);
}

// What every thread of a team does; all of it is done when they leave.
static void linear_in_team(const LinearArgs& a) {
    const long blocks = (a.out_features + OUTPUTS - 1) / OUTPUTS, steps = a.in_features / STEP;
    // When no later rows read the widened weights again, few of them are kept.
    const bool once = a.kernel == LINEAR_AMX ? a.rows <= ROWS : a.rows <= 8 && (a.rows & (a.rows - 1)) == 0;
    const long ring = once && steps > RING ? RING : steps;
    alignas(64) bf16 small[RING * PANEL];
    bf16* panel = small;
    if (a.weight_bits == 8 && ring > RING) panel = (bf16*)aligned_alloc(64, ring * PANEL * sizeof(bf16));
    BlockSums buffers[2];
    long configured = 0;
#pragma omp for schedule(static) nowait
    for (long block = 0; block < blocks; block++) {
        const long at = block * steps * PANEL;
        if (a.weight_bits == 8) {
            NarrowWeights weights{(const uint8_t*)a.weight + at, panel, ring, steps};
            linear_block(a, block, weights, buffers, &configured);
        } else {
            linear_block(a, block, WideWeights{(const bf16*)a.weight + at}, buffers, &configured);
        }
    }
#if defined(__AMX_BF16__)
    if (configured) { _tile_release(); }
#endif
    if (panel != small) free(panel);
#pragma omp barrier
}

static void linear(const LinearArgs& a) {
#pragma omp parallel num_threads(a.num_threads)
    linear_in_team(a);
}
#endif

// The best kernel for this CPU.
static LinearKernel best_linear_kernel() {
#if defined(ANGELSPEC_LINEAR)
    return amx_allowed() ? LINEAR_AMX : LINEAR_AVX512;
#else
    return LINEAR_NONE;
#endif
}

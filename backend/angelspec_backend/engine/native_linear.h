// Linear layers with weights of bf16, or of 8 bits that widen to bf16 on their way; products and sums are those of bf16.
//
// An output is one sum over the inputs in ascending order, with a fixed instruction, whatever the number of
// rows; so a row does not depend on the rows beside it.  Two kernels: AMX tiles, and AVX-512 dot products
// where the CPU (or the kernel of the operating system) has no AMX.  Their sums round differently.
#pragma once

#include <cstdlib>

#include "native_amx.h"
#include "native_rows.h"

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

constexpr int OUTPUTS = 32;       // outputs computed together: two tiles of 16
constexpr long PANEL = STEP * OUTPUTS;  // weights in one step of a block of outputs
constexpr int RING = 4;           // widened steps kept when no later rows need them
constexpr int CHUNK = 18;         // steps whose weights stay in L1 while the rows pass by
constexpr long RESIDENT = 800 << 10;  // bytes of rows that stay in L2 while the weights pass by
constexpr long MOST_ROWS = 512;   // in one such pass
constexpr long ROWS_TO_SHARE = 128; // of each thread
constexpr long WORTH_TILING = 64; // rows from which it pays to copy them in the order of tiles

typedef Rows<const bf16> Inputs;

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

// One step of a tile: [PANEL / 2] bytes -> bf16 [16 pairs of inputs][16 outputs][2]
static inline void widen_tile(const uint8_t* from, bf16* to) {
    const __m512i low0 = _mm512_load_si512(BF16_BYTES.low), low1 = _mm512_load_si512(BF16_BYTES.low + 64);
    const __m512i high0 = _mm512_load_si512(BF16_BYTES.high), high1 = _mm512_load_si512(BF16_BYTES.high + 64);
    const __m512i sign = _mm512_set1_epi8(-128);
    for (int i = 0; i < PANEL / 2; i += 64) {
        __m512i code = _mm512_loadu_si512(from + i);
        _mm_prefetch((const char*)from + i + 2048, _MM_HINT_T0);
        __m512i low = _mm512_permutex2var_epi8(low0, code, low1);
        __m512i high = _mm512_permutex2var_epi8(high0, code, high1);
        high = _mm512_or_si512(high, _mm512_and_si512(code, sign));
        _mm512_store_si512(to + i, _mm512_unpacklo_epi8(low, high));
        _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(low, high));
    }
}

// What becomes of the sums of a block of outputs: scaled, with the bias, rounded, stored; or for a gate and its `up`,
// 16 outputs of each, the activation of an MLP.
struct Output {
    const LinearArgs& args;
    long first, second;  // outputs of the two tiles
    const Rows<bf16>* activated;  // of the next layer: silu(gate) * up is stored there; or null
    __m512 scale[2], bias[2];
    uint32_t here;  // which of the 32 are outputs

    Output(const LinearArgs& a, long first, long second, const Rows<bf16>* activated)
        : args(a), first(first), second(second), activated(activated) {
        const long n = activated ? OUTPUTS : a.out_features - first;  // OUTPUTS or more, or what is left
        here = n >= OUTPUTS ? ~0u : (1u << n) - 1;
        const __mmask16 masks[2] = {(__mmask16)here, (__mmask16)(here >> 16)};
        for (int half = 0; half < 2; half++) {
            const long at = half ? second : first;
            scale[half] = a.scale ? _mm512_maskz_loadu_ps(masks[half], a.scale + at) : _mm512_set1_ps(1);
            bias[half] = _mm512_setzero_ps();
            if (!a.bias) continue;
            __m256i narrow = _mm256_maskz_loadu_epi16(masks[half], a.bias + at);
            bias[half] = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16);
        }
    }

    void put(long row, const float* sums) const {
        __m512 low = _mm512_fmadd_ps(_mm512_load_ps(sums), scale[0], bias[0]);
        __m512 high = _mm512_fmadd_ps(_mm512_load_ps(sums + 16), scale[1], bias[1]);
        if (activated) {
            f32v gate = round_to<bf16>((f32v)low), up = round_to<bf16>((f32v)high);
            store(activated->at(row, first), silu_and_mul<bf16>(gate, up));
        } else {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
            _mm512_mask_storeu_epi16(args.out + row * args.out_features + first, here, both);
        }
    }
};

// The sums of a block of rows with a block of outputs, on their way to the output.
struct BlockSums {
    alignas(64) float sums[ROWS * OUTPUTS];
    long row = 0, count = 0, done = 0;  // rows stored

    // Store the next `some` rows.
    void finish(const Output& output, long some) {
        const long end = done + some < count ? done + some : count;
        for (; done < end; done++) output.put(row + done, sums + done * OUTPUTS);
    }
};

// The weights of a block of outputs are read step by step, a tile [PANEL / 2] for each half of it.  `ready(k, end)` is
// called before step k is first used, of the steps until `end`.
struct WideWeights {  // bf16: from where they are; the memory is asked early
    const bf16* from[2];  // step 0 of each tile; steps are PANEL apart
    const bf16* tile(long k, int half) const { return from[half] + k * PANEL; }
    void ready(long k, long) {
        for (int half = 0; half < 2; half++)
            for (long i = 0; i < PANEL / 2; i += 32) _mm_prefetch((const char*)(tile(k + 3, half) + i), _MM_HINT_T0);
    }
};

struct NarrowWeights {  // 8 bits: widened into a panel whose steps repeat after `ring`
    const uint8_t* from[2];
    bf16* panel;
    long ring;
    const bf16* tile(long k, int half) const { return panel + k % ring * PANEL + half * (PANEL / 2); }
    void ready(long k, long end) {
        if (k >= end) return;
        for (int half = 0; half < 2; half++)
            widen_tile(from[half] + k * PANEL, panel + k % ring * PANEL + half * (PANEL / 2));
    }
};

// The product of blocks of rows with one block of outputs, for the steps [begin, end) of the sums.
template <class Weights>
struct LinearBlock {
    const Inputs& inputs;
    Weights& weights;
    const Output& output;
    long begin, end;

    template <int N>
    void dot(const bf16* x, bool fresh, float* sums) const {
        __m512 acc[N][2] = {};
        if (fresh) weights.ready(begin, end);
        for (long k = begin; k < end; k++) {
            if (fresh) weights.ready(k + 1, end);
            const bf16 *first = weights.tile(k, 0), *second = weights.tile(k, 1);
            for (int pair = 0; pair < STEP / 2; pair++) {
                __m512bh a = (__m512bh)_mm512_load_si512(first + pair * 32);
                __m512bh b = (__m512bh)_mm512_load_si512(second + pair * 32);
                for (int r = 0; r < N; r++) {
                    int32_t two;
                    memcpy(&two, x + r * inputs.row + k * inputs.step + 2 * pair, 4);
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
            x += n * inputs.row, sums += n * OUTPUTS, count -= n;
        }
    }

#if defined(__AMX_BF16__)
    // Rows pass by and are read with the hint that they do, so that they do not push the weights out of L1.
    template <bool SECOND>  // whether there are rows for a second tile
    void tiles(const bf16* x, bool fresh, float* sums, BlockSums& earlier) const {
        const long stride = inputs.row * sizeof(bf16), some = (ROWS + end - begin - 1) / (end - begin);
        if (begin == 0) {
            _tile_zero(0);
            _tile_zero(1);
            if (SECOND) {
                _tile_zero(2);
                _tile_zero(3);
            }
        } else {
            asm volatile("" ::: "memory");
            _tile_loadd(0, sums, OUTPUTS * 4);
            _tile_loadd(1, sums + 16, OUTPUTS * 4);
            if (SECOND) {
                _tile_loadd(2, sums + TILE_ROWS * OUTPUTS, OUTPUTS * 4);
                _tile_loadd(3, sums + TILE_ROWS * OUTPUTS + 16, OUTPUTS * 4);
            }
        }
        if (fresh) weights.ready(begin, end);
        x += begin * inputs.step;
        for (long k = begin; k < end; k++, x += inputs.step) {
            if (fresh) weights.ready(k + 1, end);
            earlier.finish(output, some);  // spread, so that no store has to wait
            asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
            _tile_stream_loadd(4, x, stride);
            _tile_loadd(6, weights.tile(k, 0), 64);
            _tile_loadd(7, weights.tile(k, 1), 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (SECOND) {
                _tile_stream_loadd(5, x + TILE_ROWS * inputs.row, stride);
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

// Whether threads share the rows, each computing all outputs of its own, or else the outputs.  Rows that stay with a
// thread from one layer to the next stay in its cache, but all threads read all weights.
static bool by_rows(long rows, int num_threads) { return rows >= ROWS_TO_SHARE * num_threads; }

// How the rows and the sums are cut, so that what is used again is still in a cache; it changes no bits.
struct LinearCut {
    long steps, chunk;  // of steps
    long rows;          // in one pass over the weights

    LinearCut(const LinearArgs& a, long count) : steps(a.in_features / STEP), chunk(steps), rows(count) {
        if (a.kernel != LINEAR_AMX || count <= ROWS) return;
        const long chunks = (steps + CHUNK - 1) / CHUNK, resident = RESIDENT / (a.in_features * (long)sizeof(bf16));
        chunk = (steps + chunks - 1) / chunks;
        const long most = resident < 128 ? 128 : resident > MOST_ROWS ? MOST_ROWS : resident / ROWS * ROWS;
        const long passes = (count + most - 1) / most;
        rows = ((count + passes - 1) / passes + ROWS - 1) / ROWS * ROWS;
    }
};

// What a thread needs to compute blocks.
struct LinearScratch {
    BlockSums sums[MOST_ROWS / ROWS];
    long configured = 0;  // rows of the tiles
    bf16* panel = nullptr;  // of widened weights
    long ring = 0;
};

// The rows [first, last) of one block of outputs.
template <class Weights>
static void linear_block(const LinearArgs& a, const Inputs& inputs, const LinearCut& cut, long first, long last,
                         const Output& output, Weights weights, LinearScratch& s) {
    for (long begin = 0; begin < cut.steps; begin += cut.chunk) {
        const long end = begin + cut.chunk < cut.steps ? begin + cut.chunk : cut.steps;
        LinearBlock<Weights> op{inputs, weights, output, begin, end};
        const long buffers = cut.chunk < cut.steps ? MOST_ROWS / ROWS : 2;
        for (long row = first, i = 0; row < last; row += ROWS, i = (i + 1) % buffers) {
            const long count = last - row < ROWS ? last - row : ROWS;
            const bf16* x = inputs.at(row, 0);
            BlockSums &now = s.sums[i], &earlier = s.sums[(i + buffers - 1) % buffers];
#if defined(__AMX_BF16__)
            if (a.kernel == LINEAR_AMX) {
                if (s.configured != count) {
                    const long some = count < TILE_ROWS ? count : TILE_ROWS, others = count - some;
                    const long rows[8] = {some, some, others, others, some, others, 16, 16};
                    configure_tiles(rows);
                    s.configured = count;
                }
                count > TILE_ROWS ? op.template tiles<true>(x, row == first, now.sums, earlier)
                                  : op.template tiles<false>(x, row == first, now.sums, earlier);
            }
#endif
            if (a.kernel == LINEAR_AVX512) op.dots(x, count, row == first, now.sums);
            if (end < cut.steps) continue;
            earlier.finish(output, ROWS);
            now.row = row, now.count = count, now.done = 0;
        }
    }
    for (BlockSums& sums : s.sums) sums.finish(output, ROWS);
}

// Some rows and blocks of outputs, by one thread.  activated: see Output.
static void linear_share(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>* activated, const Share& rows,
                         const Share& blocks) {
    const LinearCut cut(a, rows.end - rows.begin);
    // When no later rows read the widened weights again, few of them are kept.
    const bool once = a.kernel == LINEAR_AMX ? a.rows <= ROWS : a.rows <= 8 && (a.rows & (a.rows - 1)) == 0;
    LinearScratch s;
    alignas(64) bf16 small[RING * PANEL];
    s.panel = small, s.ring = once && cut.chunk > RING ? RING : cut.chunk;
    if (a.weight_bits == 8 && s.ring > RING) s.panel = (bf16*)aligned_alloc(64, s.ring * PANEL * sizeof(bf16));
    for (long first = rows.begin; first < rows.end; first += cut.rows) {
        const long last = first + cut.rows < rows.end ? first + cut.rows : rows.end;
        for (long block = blocks.begin; block < blocks.end; block++) {
            // The second tile is the next one, or that of `up`.
            const long one = activated ? block : 2 * block, other = activated ? block + a.out_features / 32 : one + 1;
            const Output output(a, one * 16, other * 16, activated);
            auto place = [&](long tile) { return (tile / 2 * cut.steps * 2 + tile % 2) * (PANEL / 2); };
            const long at[2] = {place(one), place(other)};
            if (a.weight_bits == 8) {
                const uint8_t* w = (const uint8_t*)a.weight;
                NarrowWeights weights{{w + at[0], w + at[1]}, s.panel, s.ring};
                linear_block(a, inputs, cut, first, last, output, weights, s);
            } else {
                const bf16* w = (const bf16*)a.weight;
                linear_block(a, inputs, cut, first, last, output, WideWeights{{w + at[0], w + at[1]}}, s);
            }
        }
    }
#if defined(__AMX_BF16__)
    if (s.configured) { _tile_release(); }
#endif
    if (s.panel != small) free(s.panel);
}

// What every thread of a team does.  All of it is done when they leave, or the thread's own rows if they share rows.
static void linear_in_team(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>* activated = nullptr) {
    const long blocks = (a.out_features + OUTPUTS - 1) / OUTPUTS;
    if (by_rows(a.rows, omp_get_num_threads())) {
        linear_share(a, inputs, activated, Share::of(a.rows, ROWS), {0, blocks});
    } else {
        linear_share(a, inputs, activated, {0, a.rows}, Share::of(blocks, 1));
#pragma omp barrier
    }
}

// The same for row-major inputs; all of it is done when they leave.
static void linear_in_team(const LinearArgs& a) {
    linear_in_team(a, Inputs::row_major(a.x, a.in_features));
    if (by_rows(a.rows, omp_get_num_threads())) {
#pragma omp barrier
    }
}

// Rows of a row-major matrix in the order in which tiles are read.
static void tile_in_team(const LinearArgs& a, const Rows<bf16>& tiled) {
    const long steps = a.in_features / STEP;
    const Share rows = Share::of(a.rows, ROWS);
    for (long r = rows.begin; r < rows.end; r++)
        for (long k = 0; k < steps; k++)
            _mm512_store_si512(tiled.at(r, k * STEP), _mm512_loadu_si512(a.x + r * a.in_features + k * STEP));
#pragma omp barrier
}

static void linear(const LinearArgs& a) {
    const Inputs inputs = Inputs::row_major(a.x, a.in_features);
    bf16* room = nullptr;
    if (a.kernel == LINEAR_AMX && a.rows >= WORTH_TILING)
        room = (bf16*)aligned_alloc(64, (a.rows + ROWS - 1) / ROWS * ROWS * a.in_features * sizeof(bf16));
    const Rows<bf16> tiled = Rows<bf16>::tiled(room, a.in_features);
#pragma omp parallel num_threads(a.num_threads)
    {
        if (room) tile_in_team(a, tiled);
        linear_in_team(a, room ? Inputs(tiled) : inputs);
    }
    free(room);
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

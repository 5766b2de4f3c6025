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
constexpr int RING = 4;           // widened steps kept when no later rows need them
constexpr int CHUNK = 18;         // steps whose weights stay in L1 while the rows pass by
constexpr long RESIDENT = 800 << 10;  // bytes of rows that stay in L2 while the weights pass by
constexpr long MOST_ROWS = 512;   // in one such pass

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

// The product of blocks of rows with one block of outputs, for the steps [begin, end) of the sums.
template <class Weights>
struct LinearBlock {
    const Inputs& inputs;
    Weights& weights;
    NextWeights& next;
    const Output& output;
    long begin, end;

    template <int N>
    void dot(const bf16* x, bool fresh, float* sums) const {
        __m512 acc[N][2] = {};
        if (fresh) weights.ready(begin, end);
        for (long k = begin; k < end; k++) {
            if (fresh) weights.ready(k + 1, end);
            const bf16 *first = weights.step(k), *second = first + PANEL / 2;
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
        const long stride = inputs.row * sizeof(bf16), step = inputs.step, second = TILE_ROWS * inputs.row;
        const long some = (ROWS + end - begin - 1) / (end - begin);
        asm volatile("" ::: "memory");  // the compiler does not know that tile loads read memory
        if (begin == 0) {
            _tile_zero(0);
            _tile_zero(1);
            if (SECOND) {
                _tile_zero(2);
                _tile_zero(3);
            }
        } else {
            _tile_loadd(0, sums, OUTPUTS * 4);
            _tile_loadd(1, sums + 16, OUTPUTS * 4);
            if (SECOND) {
                _tile_loadd(2, sums + TILE_ROWS * OUTPUTS, OUTPUTS * 4);
                _tile_loadd(3, sums + TILE_ROWS * OUTPUTS + 16, OUTPUTS * 4);
            }
        }
        if (fresh) weights.ready(begin, end);
        x += begin * step;
        for (long k = begin; k < end; k++, x += step) {
            fresh ? weights.ready(k + 1, end) : next.ask();
            earlier.finish(output, some);  // spread, so that no store has to wait
            const bf16* weight = weights.step(k);
            _tile_stream_loadd(4, x, stride);
            _tile_loadd(6, weight, 64);
            _tile_loadd(7, weight + PANEL / 2, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (SECOND) {
                _tile_stream_loadd(5, x + second, stride);
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
static void linear_block(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>& out, const LinearCut& cut, long first,
                         long last, long block, Weights weights, LinearScratch& s) {
    const Output output(a, block);
    NextWeights next(weights.from, cut.steps * PANEL * sizeof(*weights.from), cut.steps, (last - first + ROWS - 1) / ROWS);
    for (long begin = 0; begin < cut.steps; begin += cut.chunk) {
        const long end = begin + cut.chunk < cut.steps ? begin + cut.chunk : cut.steps;
        LinearBlock<Weights> op{inputs, weights, next, output, begin, end};
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
            now.to = out.at(row, block * (a.gated ? OUTPUTS / 2 : OUTPUTS));
            now.stride = out.row, now.count = count, now.done = 0;
        }
    }
    for (BlockSums& sums : s.sums) sums.finish(output, ROWS);
}

static long blocks_of(const LinearArgs& a) {
    const long each = a.gated ? OUTPUTS / 2 : OUTPUTS;
    return (a.out_features + each - 1) / each;
}

// Some rows and blocks of outputs, by one thread.
static void linear_share(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>& out, const Share& rows,
                         const Share& blocks) {
    const LinearCut cut(a, rows.end - rows.begin);
    // When no later rows read the widened weights again, few of them are kept.
    const bool once = a.kernel == LINEAR_AMX ? a.rows <= ROWS : a.rows <= 8 && (a.rows & (a.rows - 1)) == 0;
    LinearScratch s;
    alignas(64) bf16 small[RING * PANEL];
    s.panel = small, s.ring = RING;
    while (!once && s.ring < cut.chunk) s.ring *= 2;
    if (a.weight_bits == 8 && s.ring > RING) s.panel = (bf16*)aligned_alloc(64, s.ring * PANEL * sizeof(bf16));
    for (long first = rows.begin; first < rows.end; first += cut.rows) {
        const long last = first + cut.rows < rows.end ? first + cut.rows : rows.end;
        for (long block = blocks.begin; block < blocks.end; block++) {
            const long at = block * cut.steps * PANEL;
            if (a.weight_bits == 8) {
                NarrowWeights weights{(const uint8_t*)a.weight + at, s.panel, s.ring};
                linear_block(a, inputs, out, cut, first, last, block, weights, s);
            } else {
                linear_block(a, inputs, out, cut, first, last, block, WideWeights{(const bf16*)a.weight + at}, s);
            }
        }
    }
#if defined(__AMX_BF16__)
    if (s.configured) { _tile_release(); }
#endif
    if (s.panel != small) free(s.panel);
}

// What every thread of a team does; all of it is done when they leave.
static void linear_in_team(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>& out) {
    linear_share(a, inputs, out, {0, a.rows}, Share::of(blocks_of(a), 1));
#pragma omp barrier
}

static void linear_in_team(const LinearArgs& a) {
    linear_in_team(a, Inputs::row_major(a.x, a.in_features), Rows<bf16>::row_major(a.out, a.out_features));
}

// The same for the thread's own rows alone; it does not wait for other threads.
static void linear_of_own_rows(const LinearArgs& a, const Inputs& inputs, const Rows<bf16>& out) {
    linear_share(a, inputs, out, Share::of(a.rows, ROWS), {0, blocks_of(a)});
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

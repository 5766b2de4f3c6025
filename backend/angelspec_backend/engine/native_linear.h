// Linear layers with weights of bf16, or of 8 bits that widen to bf16 on their way; products and sums are those of bf16.
//
// An output is one sum over the inputs in ascending order, with a fixed instruction, whatever the number of
// rows; so a row does not depend on the rows beside it.  Two kernels: AMX tiles, and AVX-512 dot products
// where the CPU (or the kernel of the operating system) has no AMX.  Their sums round differently.
#pragma once

#include <cstdlib>

#include "native_amx.h"
#include "native_linear_parts.h"

#if defined(ANGELSPEC_LINEAR)

constexpr int RING = 4;           // widened steps kept when no later rows need them
constexpr int CHUNK = 18;         // steps whose weights stay in L1 while the rows pass by
constexpr long RESIDENT = 800 << 10;  // bytes of rows that stay in L2 while the weights pass by
constexpr long MOST_ROWS = 512;   // in one such pass

typedef Rows<const bf16> Inputs;

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

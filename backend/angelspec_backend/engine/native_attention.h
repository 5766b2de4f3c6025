// Paged attention whose result for one query never depends on what is computed beside it.
//
// A query reduces over the context in an order fixed by absolute positions alone: online softmax
// (Milakov and Gimelshein, arXiv 1805.02867) over tiles of 64 positions inside segments of 512, and the
// segments merged in ascending order.  A tile in which a query sees nothing leaves its state untouched
// to the bit, and a masked position adds exactly zero, so grouping queries, splitting the context over
// threads and batch mates change nothing.
#pragma once

#include <cstdlib>

#include "native_amx.h"
#include "native_fma.h"

constexpr int SEGMENT = 512;  // positions in one independent reduction

struct AttentionArgs {  // mirrored by native.AttentionArgs
    const void *query, *key_cache, *value_cache;
    void* out;
    const int32_t *query_start, *context_lens, *block_table;
    const float* sinks;     // [num_heads] or null
    int64_t query_stride;   // elements between two tokens of query; out is dense
    int32_t num_tokens, num_rows, max_blocks, num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int32_t sliding_window;  // positions a query sees, itself included; 0: all
    int32_t num_threads;
    float scale, softcap;
};

// The queries [first, first + count) of a row's (token, head-of-group) pairs, for one kv head, over [begin, end).
struct Task {
    int32_t row, kv_head, first, count, begin, end;
    float* state;  // of the partial result, null when it is finished right away
};

// Tile is how one tile of positions is computed: FmaTile or AmxTile.
template <class T, class Tile>
struct Attention {
    struct Scratch {
        Tile tile;
        alignas(64) float part[MAX_QUERIES * (MAX_DIM + LANES + 1)];
        alignas(64) float whole[MAX_QUERIES * (MAX_DIM + LANES + 1)];
    };

    const AttentionArgs& args;
    const int group, width;  // query heads per kv head; value_dim as it lies in scratch

    explicit Attention(const AttentionArgs& a)
        : args(a), group(a.num_heads / a.num_kv_heads), width((a.value_dim + LANES - 1) / LANES * LANES) {}

    int position(const Task& t, int i) const { return args.context_lens[t.row] + (t.first + i) / group; }
    int head(const Task& t, int i) const { return t.kv_head * group + (t.first + i) % group; }
    long token(const Task& t, int i) const { return args.query_start[t.row] + (t.first + i) / group; }
    int oldest(int position) const {  // the first position that this one sees
        return args.sliding_window && position >= args.sliding_window ? position - args.sliding_window + 1 : 0;
    }

    void load_query(const Task& t, Tile& tile) const {
        for (int i = 0; i < t.count; i++) {
            const T* from = (const T*)args.query + token(t, i) * args.query_stride;
            tile.load_query(i, from + (long)head(t, i) * args.key_dim, args.key_dim);
        }
    }

    // Where in a cache the rows of positions [begin, begin + count) are; the last one is repeated to fill lanes.
    void locate(const Task& t, int begin, int count, int64_t* index) const {
        const int32_t* table = args.block_table + (long)t.row * args.max_blocks;
        int block = begin / args.block_size, offset = begin % args.block_size;
        for (int j = 0; j < count; block++, offset = 0) {
            int64_t at = ((long)table[block] * args.num_kv_heads + t.kv_head) * args.block_size;
            for (; offset < args.block_size && j < count; offset++) index[j++] = at + offset;
        }
        for (int j = count; j % LANES; j++) index[j] = index[count - 1];
    }

    // Ask for the keys and values of a tile: its blocks lie anywhere, so the CPU cannot guess them.
    void prefetch(const Task& t, int begin, int count) const {
        const int32_t* table = args.block_table + (long)t.row * args.max_blocks;
        auto touch = [](const void* cache, long row, int rows, int dim) {
            const char* from = (const char*)cache + row * dim * sizeof(T);
            for (long i = 0; i < (long)(rows * dim * sizeof(T)); i += 64) __builtin_prefetch(from + i);
        };
        for (int at = begin, rows; at < begin + count; at += rows) {
            const int offset = at % args.block_size, left = args.block_size - offset;
            rows = left < begin + count - at ? left : begin + count - at;
            long row = ((long)table[at / args.block_size] * args.num_kv_heads + t.kv_head) * args.block_size + offset;
            touch(args.key_cache, row, rows, args.key_dim);
            touch(args.value_cache, row, rows, args.value_dim);
        }
    }

    void tile(const Task& t, int begin, int count, Tile& tile, const State& state) const {
        int64_t index[TILE];
        locate(t, begin, count, index);
        tile.unpack((const T*)args.key_cache, (const T*)args.value_cache, index, count, args.key_dim,
                    args.value_dim, width);
        Visible visible[Tile::STRIPE];  // of each query, as offsets within the tile
        for (int i = 0, n; i < t.count; i += n) {
            n = t.count - i < Tile::STRIPE ? t.count - i : Tile::STRIPE;
            bool any = false;
            for (int q = 0; q < n; q++) {
                int at = position(t, i + q);
                visible[q] = {oldest(at) - begin, at - begin < count ? at - begin + 1 : count};
                any |= !visible[q].none();
            }
            if (any) tile.stripe(i, n, visible, count, args.key_dim, width, args.scale, args.softcap, state);
        }
    }

    void segment(const Task& t, int begin, int end, Tile& tile, const State& state) const {
        state.clear(t.count, width);
        int last = position(t, t.count - 1) + 1;
        if (end > last) end = last;
        int first = oldest(position(t, 0)) / TILE * TILE;  // earlier tiles lie outside every window
        for (int at = begin > first ? begin : first; at < end; at += TILE) {
            auto count = [&](int from) { return end - from < TILE ? end - from : TILE; };
            prefetch(t, at + TILE, count(at + TILE));
            this->tile(t, at, count(at), tile, state);
        }
    }

    void finish(const Task& t, const State& state) const {
        for (int i = 0; i < t.count; i++) {
            float total = sum_lanes(load(state.total + i * LANES)), keep = 1;
            if (args.sinks) {  // one more logit, whose value is zero
                float sink = args.sinks[head(t, i)] * LOG2E, top = state.best[i] > sink ? state.best[i] : sink;
                keep = exp2(splat(state.best[i] - top))[0];
                total = total * keep + exp2(splat(sink - top))[0];
            }
            T* to = (T*)args.out + (token(t, i) * args.num_heads + head(t, i)) * args.value_dim;
            for (int d = 0; d < args.value_dim; d += LANES)
                store(to + d, load(state.acc + i * width + d) * splat(keep / total), args.value_dim - d);
        }
    }

    // next: the task that this thread will run after this one, or null.
    void run(const Task& t, Scratch& s, const Task* next = nullptr) const {
        if (next) prefetch(*next, next->begin, next->end - next->begin < TILE ? next->end - next->begin : TILE);
        load_query(t, s.tile);
        if (t.state) return segment(t, t.begin, t.end, s.tile, State(t.state, t.count));
        State part(s.part, t.count), whole(s.whole, t.count);
        segment(t, t.begin, t.begin + SEGMENT, s.tile, whole);
        for (int at = t.begin + SEGMENT; at < t.end; at += SEGMENT) {
            segment(t, at, at + SEGMENT, s.tile, part);
            whole.merge(part, t.count, width);
        }
        finish(t, whole);
    }
};

// The whole tasks of a batch, [return value] of them; the caller frees *tasks.
template <class Op>
static int plan(const Op& op, Task** tasks) {
    const AttentionArgs& a = op.args;
    int total = 0, n = 0;
    auto pairs = [&](int row) { return (a.query_start[row + 1] - a.query_start[row]) * op.group; };
    for (int row = 0; row < a.num_rows; row++)
        total += (pairs(row) + MAX_QUERIES - 1) / MAX_QUERIES * a.num_kv_heads;
    *tasks = (Task*)malloc(sizeof(Task) * (total + 1));
    for (int row = 0; row < a.num_rows; row++)
        for (int first = 0; first < pairs(row); first += MAX_QUERIES)
            for (int kv_head = 0; kv_head < a.num_kv_heads; kv_head++) {
                int count = pairs(row) - first < MAX_QUERIES ? pairs(row) - first : MAX_QUERIES;
                Task t = {row, kv_head, first, count, 0, 0, nullptr};
                t.begin = op.oldest(op.position(t, 0)) / SEGMENT * SEGMENT;
                t.end = op.position(t, count - 1) + 1;
                (*tasks)[n++] = t;
            }
    return n;
}

static int segments(const Task& t) { return (t.end - t.begin + SEGMENT - 1) / SEGMENT; }

// Few long contexts on many threads: every segment is a task of its own, then the partial results are merged.
template <class Op>
static void attend_split(const Op& op, Task* tasks, int n, int num_threads) {
    long parts = 0, floats = 0;
    for (int i = 0; i < n; i++) {
        parts += segments(tasks[i]);
        floats += segments(tasks[i]) * State::floats(tasks[i].count, op.width);
    }
    Task* pieces = (Task*)malloc(sizeof(Task) * parts);
    float* memory = (float*)malloc(sizeof(float) * floats);
    float* state = memory;
    long p = 0;
    for (int i = 0; i < n; i++) {
        tasks[i].state = state;
        for (int at = tasks[i].begin; at < tasks[i].end; at += SEGMENT) {
            pieces[p] = tasks[i];
            pieces[p].begin = at;
            pieces[p].end = at + SEGMENT;
            pieces[p++].state = state;
            state += State::floats(tasks[i].count, op.width);
        }
    }
#pragma omp parallel num_threads(num_threads)
    {
        typename Op::Scratch scratch;
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < parts; i++) op.run(pieces[i], scratch);
#pragma omp for schedule(dynamic, 1)
        for (int i = 0; i < n; i++) {
            State whole(tasks[i].state, tasks[i].count);
            for (int k = 1; k < segments(tasks[i]); k++)
                whole.merge(State(tasks[i].state + k * State::floats(tasks[i].count, op.width), tasks[i].count),
                            tasks[i].count, op.width);
            op.finish(tasks[i], whole);
        }
    }
    free(memory);
    free(pieces);
}

template <class T, class Tile>
static void attend(const AttentionArgs& args) {
    using Op = Attention<T, Tile>;
    Op op(args);
    Task* tasks;
    int n = plan(op, &tasks), longest = 0;
    double work = 0;  // in unpacked positions
    for (int i = 0; i < n; i++) {
        work += (double)(tasks[i].end - tasks[i].begin) * (1 + tasks[i].count / 8);
        if (segments(tasks[i]) > longest) longest = segments(tasks[i]);
    }
    int num_threads = work < 2048 ? 1 : args.num_threads;  // waking sleeping threads takes as long
    if (num_threads > 1 && longest > 1 && n < 4 * num_threads) {
        attend_split(op, tasks, n, num_threads);
    } else {
        // Neighbouring tasks go to one thread, which can ask for the next one's memory ahead of time.
        const int chunk = n >= 32 * num_threads ? 8 : 1;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
        {
            typename Op::Scratch scratch;
#pragma omp for schedule(dynamic, chunk)
            for (int i = 0; i < n; i++) op.run(tasks[i], scratch, chunk > 1 && i + 1 < n ? tasks + i + 1 : nullptr);
        }
    }
    free(tasks);
    long row = (long)args.num_heads * args.value_dim, used = args.query_start[args.num_rows];
    memset((T*)args.out + used * row, 0, (args.num_tokens - used) * row * sizeof(T));  // tokens of no row
}

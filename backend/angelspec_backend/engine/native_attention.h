// Paged attention whose result for one query never depends on what is computed beside it.
//
// A query reduces over the context in an order fixed by absolute positions alone: online softmax
// (Milakov and Gimelshein, arXiv 1805.02867) over tiles of 64 positions inside segments of 512, and the
// segments merged in ascending order.  A tile in which a query sees nothing leaves its state untouched
// to the bit, and a masked position adds exactly zero, so grouping queries, splitting the context over
// threads and batch mates change nothing.
#pragma once

#include "native_amx.h"
#include "native_fma.h"
#include "native_rows.h"

constexpr int SEGMENT = 512;  // positions in one independent reduction

struct AttentionArgs {  // mirrored by native_args.AttentionArgs
    const void *query, *key_cache, *value_cache;
    void* out;
    const int32_t *query_start, *context_lens, *block_table;
    const float* sinks;     // [num_heads] or null
    int64_t query_stride;   // elements between two tokens of query; out is dense
    int64_t key_stride, value_stride;  // elements between two blocks of a cache; a block is dense
    int32_t num_tokens, num_rows, max_blocks, num_heads, num_kv_heads, key_dim, value_dim, block_size;
    int32_t sliding_window;  // positions a query sees, itself included; 0: all
    int32_t bidirectional;   // not 0: every query of a row sees what one at position context_lens sees
    int32_t num_threads;
    float scale, softcap;
};

// The queries [first, first + count) of a row's (token, head-of-group) pairs, for `heads` kv heads, over [begin, end).
struct Task {
    int32_t row, kv_head, heads, first, count, begin, end;
    float* state;  // of the partial result, null when it is finished right away

    // Where pair i of the h-th head lies in scratch; every head starts a stripe.
    int at(int h, int i) const { return h * State::rounded(count) + i; }
    int size() const { return heads > 1 ? heads * State::rounded(count) : count; }
};

// Tile is how one tile of positions is computed: FmaTile or AmxTile.
template <class T, class Tile>
struct Attention {
    struct Scratch {
        Tile tile;
        int position[MAX_QUERIES];  // of each pair of the task
        alignas(64) float part[MAX_QUERIES * (MAX_DIM + LANES + 1)];
        alignas(64) float whole[MAX_QUERIES * (MAX_DIM + LANES + 1)];
    };

    const AttentionArgs& args;
    const int group, width;  // query heads per kv head; value_dim as it lies in scratch
    const Rows<T> out;       // [num_tokens, num_heads * value_dim]

    Attention(const AttentionArgs& a, const Rows<T>& out)
        : args(a), group(a.num_heads / a.num_kv_heads), width((a.value_dim + LANES - 1) / LANES * LANES), out(out) {}

    explicit Attention(const AttentionArgs& a)
        : Attention(a, Rows<T>::row_major((T*)a.out, (long)a.num_heads * a.value_dim)) {}

    int position(const Task& t, int i) const {  // the last that the query sees
        return args.context_lens[t.row] + (args.bidirectional ? 0 : (t.first + i) / group);
    }
    int head(const Task& t, int h, int i) const { return (t.kv_head + h) * group + (t.first + i) % group; }
    long token(const Task& t, int i) const { return args.query_start[t.row] + (t.first + i) / group; }
    int oldest(int position) const {  // the first position that this one sees
        return args.sliding_window && position >= args.sliding_window ? position - args.sliding_window + 1 : 0;
    }

    void load_query(const Task& t, Scratch& s) const {
        for (int i = 0; i < t.count; i++) s.position[i] = position(t, i);
        for (int h = 0; h < t.heads; h++)
            for (int i = 0; i < t.count; i++) {
                const T* from = (const T*)args.query + token(t, i) * args.query_stride;
                s.tile.load_query(t.at(h, i), from + (long)head(t, h, i) * args.key_dim, args.key_dim);
            }
    }

    // Where the first position of a block lies, for one kv head.
    const T* keys_of(int block, int kv_head) const {
        return (const T*)args.key_cache + block * args.key_stride + (long)kv_head * args.block_size * args.key_dim;
    }
    const T* values_of(int block, int kv_head) const {
        return (const T*)args.value_cache + block * args.value_stride + (long)kv_head * args.block_size * args.value_dim;
    }

    // Where the keys and values of positions [begin, begin + count) are; the last one is repeated to fill lanes.
    void locate(const Task& t, int h, int begin, int count, const T** keys, const T** values) const {
        const int32_t* table = args.block_table + (long)t.row * args.max_blocks;
        int block = begin / args.block_size, offset = begin % args.block_size;
        for (int j = 0; j < count; block++, offset = 0) {
            const T *key = keys_of(table[block], t.kv_head + h), *value = values_of(table[block], t.kv_head + h);
            for (; offset < args.block_size && j < count; offset++, j++) {
                keys[j] = key + (long)offset * args.key_dim;
                values[j] = value + (long)offset * args.value_dim;
            }
        }
        for (int j = count; j % LANES; j++) keys[j] = keys[count - 1];
    }

    // The keys and values of positions [begin, begin + count) will be read, those of all heads of the task: in a block
    // they are neighbours, and memory is fastest when it is read in order.
    void expect(const Task& t, int begin, int count, Ahead& ahead) const {
        const int32_t* table = args.block_table + (long)t.row * args.max_blocks;
        for (int at = begin, rows; at < begin + count; at += rows) {
            int offset = at % args.block_size;
            rows = args.block_size - offset < begin + count - at ? args.block_size - offset : begin + count - at;
            const long all = t.heads > 1 ? (long)t.heads * args.block_size - offset : rows;
            const int block = table[at / args.block_size];
            ahead.add(keys_of(block, t.kv_head) + (long)offset * args.key_dim, all * args.key_dim);
            ahead.add(values_of(block, t.kv_head) + (long)offset * args.value_dim, all * args.value_dim);
        }
    }

    // What the queries i to i + n of a task see of the positions [begin, begin + count); false: nothing.
    bool look(const int* position, int i, int n, int begin, int count, Stripe<Tile::STRIPE>& stripe) const {
        stripe.count = n;
        const int lowest = position[i], highest = position[i + n - 1];
        stripe.whole = n == Tile::STRIPE && count % LANES == 0 && lowest >= begin + count - 1 && oldest(highest) <= begin;
        bool any = stripe.whole;
        for (int q = 0; q < n && !stripe.whole; q++) {
            const int at = position[i + q];
            stripe.visible[q] = {oldest(at) - begin, at - begin < count ? at - begin + 1 : count};
            any |= !stripe.visible[q].none();
        }
        return any;
    }

    void tile(const Task& t, int begin, int count, Ahead& ahead, Scratch& s, const State& state) const {
        const T *keys[TILE], *values[TILE];
        for (int h = 0; h < t.heads; h++) {
            locate(t, h, begin, count, keys, values);
            s.tile.unpack(keys, values, count, args.key_dim, args.value_dim, width, ahead);
            Stripe<Tile::STRIPE> stripes[2];
            int place = 0, started = 0;
            auto finish = [&](int place) {
                s.tile.finish(stripes[place], place, count, args.key_dim, width, args.scale, args.softcap, state);
            };
            for (int i = 0, n; i < t.count; i += n) {
                n = t.count - i < Tile::STRIPE ? t.count - i : Tile::STRIPE;
                if (!look(s.position, i, n, begin, count, stripes[place])) continue;
                stripes[place].first = t.at(h, i);
                s.tile.start(stripes[place], place, count, args.key_dim);
                place ^= 1;
                if (started++) finish(place);
            }
            if (started) finish(place ^ 1);
        }
    }

    // next: the task that this thread runs afterwards, or null.
    void segment(const Task& t, int begin, int end, const Task* next, Scratch& s, const State& state) const {
        state.clear(t.size(), width);
        int last = position(t, t.count - 1) + 1;
        if (end > last) end = last;
        auto count = [](int from, int to) { return to - from < TILE ? to - from : TILE; };
        int first = oldest(position(t, 0)) / TILE * TILE;  // earlier tiles lie outside every window
        for (int at = begin > first ? begin : first; at < end; at += TILE) {
            Ahead ahead;
            if (at + TILE < end)
                expect(t, at + TILE, count(at + TILE, end), ahead);
            else if (next)
                expect(*next, next->begin, count(next->begin, next->end), ahead);
            tile(t, at, count(at, end), ahead, s, state);
        }
    }

    void finish(const Task& t, const State& state) const {
        for (int h = 0; h < t.heads; h++)
            for (int i = 0; i < t.count; i++) finish(t, h, i, t.at(h, i), state);
    }

    void finish(const Task& t, int h, int i, int at, const State& state) const {
        float total = sum_lanes(load(state.total + at * LANES)), keep = 1;
        if (args.sinks) {  // one more logit, whose value is zero
            float sink = args.sinks[head(t, h, i)] * LOG2E, top = state.best[at] > sink ? state.best[at] : sink;
            keep = exp2(splat(state.best[at] - top))[0];
            total = total * keep + exp2(splat(sink - top))[0];
        }
        const long row = token(t, i), from = (long)head(t, h, i) * args.value_dim;
        for (int d = 0, n; d < args.value_dim; d += n) {  // not across two steps of the output
            const int left = args.value_dim - d, room = STEP - (from + d) % STEP;
            n = left < room ? left : room;
            if (n > LANES) n = LANES;
            store(out.at(row, from + d), load(state.acc + at * width + d) * splat(keep / total), n);
        }
    }

    void run(const Task& t, Scratch& s, const Task* next = nullptr) const {
        load_query(t, s);
        if (t.state) return segment(t, t.begin, t.end, next, s, State(t.state, t.size()));
        State part(s.part, t.size()), whole(s.whole, t.size());
        for (int at = t.begin; at < t.end; at += SEGMENT) {
            const Task* following = at + SEGMENT < t.end ? nullptr : next;
            segment(t, at, at + SEGMENT, following, s, at == t.begin ? whole : part);
            if (at > t.begin) whole.merge(part, t.size(), width);
        }
        finish(t, whole);
    }
};

// Attention of a whole batch: its tasks, and how threads share them.
#pragma once

#include <vector>

#include "native_attention.h"

constexpr double WORK_FOR_ALL = 2048;  // unpacked positions; below, waking sleeping threads takes as long

// The tasks of a batch, the same for every layer with this sliding window.
struct AttentionPlan {
    std::vector<Task> tasks;
    // When there are few long contexts: the segments of the tasks, whose partial results are merged afterwards.
    std::vector<Task> pieces;
    std::vector<float> memory;  // of the partial results
    double work = 0;            // in unpacked positions

    static int segments(const Task& t) { return (t.end - t.begin + SEGMENT - 1) / SEGMENT; }

    template <class Op>
    AttentionPlan(const Op& op, int num_threads) {
        const AttentionArgs& a = op.args;
        const bool many = a.num_rows >= 4 * num_threads;  // enough for all threads without splitting rows
        int longest = 0;
        for (int row = 0; row < a.num_rows; row++) {
            const int pairs = (a.query_start[row + 1] - a.query_start[row]) * op.group;
            const bool together = many && State::rounded(pairs) * a.num_kv_heads <= MAX_QUERIES;
            const int heads = together ? a.num_kv_heads : 1;
            for (int first = 0; first < pairs; first += MAX_QUERIES)
                for (int kv_head = 0; kv_head < a.num_kv_heads; kv_head += heads) {
                    Task t = {row, kv_head, heads, first, pairs - first, 0, 0, nullptr};
                    if (t.count > MAX_QUERIES) t.count = MAX_QUERIES;
                    t.begin = op.oldest(op.position(t, 0)) / SEGMENT * SEGMENT;
                    t.end = op.position(t, t.count - 1) + 1;
                    tasks.push_back(t);
                    work += (double)(t.end - t.begin) * heads * (1 + t.count / 8);
                    if (segments(t) > longest) longest = segments(t);
                }
        }
        const bool worthwhile = num_threads > 1 && work >= WORK_FOR_ALL;
        if (worthwhile && longest > 1 && (int)tasks.size() < 4 * num_threads) split(op.width);
    }

    void split(int width) {
        long floats = 0;
        for (const Task& t : tasks) floats += segments(t) * State::floats(t.size(), width);
        memory.resize(floats);
        float* state = memory.data();
        for (Task& t : tasks) {
            t.state = state;
            for (int at = t.begin; at < t.end; at += SEGMENT, state += State::floats(t.size(), width)) {
                pieces.push_back(t);
                pieces.back().begin = at, pieces.back().end = at + SEGMENT, pieces.back().state = state;
            }
        }
    }
};

// What every thread of a team does; all of it is done when they leave.
template <class Op>
static void attend_in_team(const Op& op, const AttentionPlan& plan, int num_threads) {
    typename Op::Scratch scratch;
    const std::vector<Task>& tasks = plan.tasks;
    const int n = tasks.size();
    if (plan.pieces.empty()) {
        // Neighbouring tasks go to one thread, which can ask for the next one's memory ahead of time.
        const int chunk = n >= 8 * num_threads ? 4 : 1;
#pragma omp for schedule(dynamic, chunk)
        for (int i = 0; i < n; i++)
            op.run(tasks[i], scratch, chunk > 1 && i + 1 < n ? &tasks[i + 1] : nullptr);
        return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < (int)plan.pieces.size(); i++) op.run(plan.pieces[i], scratch);
#pragma omp for schedule(dynamic, 1)
    for (int i = 0; i < n; i++) {
        const Task& t = tasks[i];
        const long floats = State::floats(t.size(), op.width);
        State whole(t.state, t.size());
        for (int k = 1; k < AttentionPlan::segments(t); k++)
            whole.merge(State(t.state + k * floats, t.size()), t.size(), op.width);
        op.finish(t, whole);
    }
}

// Tokens of no row get zeros.
template <class T>
static void clear_padding(const AttentionArgs& a) {
    const long row = (long)a.num_heads * a.value_dim, used = a.query_start[a.num_rows];
    memset((T*)a.out + used * row, 0, (a.num_tokens - used) * row * sizeof(T));
}

template <class T, class Tile>
static void attend(const AttentionArgs& args) {
    Attention<T, Tile> op(args);
    const AttentionPlan plan(op, args.num_threads);
    const int num_threads = plan.work < WORK_FOR_ALL ? 1 : args.num_threads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    attend_in_team(op, plan, num_threads);
    clear_padding<T>(args);
}

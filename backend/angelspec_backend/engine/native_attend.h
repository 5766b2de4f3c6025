// Attention of a whole batch: its tasks, and how threads share them.
#pragma once

#include <algorithm>
#include <vector>

#include "native_attention.h"

constexpr int FEW_QUERIES = 128;  // that a task is not made smaller for
constexpr int SMALL = 64;  // pairs of a small task
constexpr double WORK_FOR_ALL = 2048;  // unpacked positions; below, waking sleeping threads takes as long

// The tasks of a batch, the same for every layer with this sliding window.
struct AttentionPlan {
    std::vector<Task> tasks;
    // When there are few long contexts: the segments of the tasks, whose partial results are merged afterwards.
    std::vector<Task> pieces;
    std::vector<float> memory;  // of the partial results
    // Tasks that go to one thread, as [begin, end): small neighbours, so that it can ask for the next one's memory ahead
    // of time.  The longest are first, so that threads end at about the same time.
    struct Group {
        int begin, end;
        double work;
    };
    std::vector<Group> groups;
    double work = 0;            // in unpacked positions
    bool last_small = false;

    // Large tasks unpack keys and values for many queries at a time; there should be some for every thread.
    static int task_size(int pairs, int heads, int num_threads) {
        const int wanted = (4 * num_threads + heads - 1) / heads, least = (pairs + MAX_QUERIES - 1) / MAX_QUERIES;
        const int most = (pairs + FEW_QUERIES - 1) / FEW_QUERIES, pieces = std::max(least, std::min(wanted, most));
        return State::rounded((pairs + pieces - 1) / pieces);
    }

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
            const int size = together ? pairs : task_size(pairs, a.num_kv_heads, num_threads);
            for (int first = 0; first < pairs; first += size)
                for (int kv_head = 0; kv_head < a.num_kv_heads; kv_head += heads) {
                    Task t = {row, kv_head, heads, first, pairs - first, 0, 0, nullptr};
                    if (t.count > size) t.count = size;
                    t.begin = op.oldest(op.position(t, 0)) / SEGMENT * SEGMENT;
                    t.end = op.position(t, t.count - 1) + 1;
                    tasks.push_back(t);
                    add_to_group((double)(t.end - t.begin) * heads * (1 + t.count / 8), many && t.count <= SMALL);
                    if (segments(t) > longest) longest = segments(t);
                }
        }
        const bool worthwhile = num_threads > 1 && work >= WORK_FOR_ALL;
        if (worthwhile && longest > 1 && (int)tasks.size() < 4 * num_threads) split(op.width);
        std::stable_sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.work > b.work; });
    }

    void add_to_group(double its_work, bool small) {
        const int end = tasks.size();
        if (!(small && last_small && groups.back().end - groups.back().begin < 4)) groups.push_back({end - 1, end, 0});
        groups.back().end = end, groups.back().work += its_work;
        work += its_work, last_small = small;
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
#pragma omp for schedule(dynamic, 1)
        for (int g = 0; g < (int)plan.groups.size(); g++)
            for (int i = plan.groups[g].begin, end = plan.groups[g].end; i < end; i++)
                op.run(tasks[i], scratch, i + 1 < end ? &tasks[i + 1] : nullptr);
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
static void clear_padding(const AttentionArgs& a, const Rows<T>& out) {
    const long n = (long)a.num_heads * a.value_dim;
    for (long t = a.query_start[a.num_rows]; t < a.num_tokens; t++)
        for (long i = 0; i < n; i++) memset(out.at(t, i), 0, sizeof(T));
}

template <class T, class Tile>
static void attend(const AttentionArgs& args) {
    Attention<T, Tile> op(args);
    const AttentionPlan plan(op, args.num_threads);
    const int num_threads = plan.work < WORK_FOR_ALL ? 1 : args.num_threads;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    attend_in_team(op, plan, num_threads);
    clear_padding<T>(args, op.out);
}

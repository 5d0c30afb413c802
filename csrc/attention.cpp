#include <algorithm>

#include "stack.h"

namespace outpace {
namespace {

constexpr int HEAD_TILE = 8;                 // heads that an attention task takes through the cache together
constexpr size_t PARTIALS = size_t(4) << 20; // numbers: partial results of attention that are kept at once
constexpr size_t SMALL_TASK = 1 << 15;       // queries x positions x dimensions: about a microsecond

}  // namespace

// Queries rounded to 8 bits, each a panel of its own: number row * heads + head.
Panels Stack::query_panels() {
    Panels p;
    p.rows = static_cast<int>(rows_.size()) * config_.heads;
    p.tile = 1;
    p.groups = cache_.layout().groups;
    const size_t groups = static_cast<size_t>(p.rows) * p.groups;
    p.q = room(query_bytes_, groups * GROUP);
    p.meta = room(query_meta_, groups * Panels::FIELDS);
    return p;
}

// Attention of all rows: q_ and the cache -> mixed_ [rows][heads * head_dim].
// A row's positions are taken in chunks of 256 by absolute position; each chunk gives a partial result, and the partial
// results are joined in order: the same operations for any number of rows, tasks and threads. A task is one chunk, the
// rows of one share and the heads of one KV head.
void Stack::attend(int layer) {
    const Config& c = config_;
    const HeadLayout& layout = cache_.layout();
    const int rows = static_cast<int>(rows_.size()), group = c.heads / c.kv_heads, window = c.windows[layer];
    const int head_tile = std::min(group, HEAD_TILE), head_tiles = ceil_div(group, head_tile);
    const int units = c.kv_heads * head_tiles;
    const size_t q_stride = padded(c.heads * c.head_dim);
    float* mixed = room(mixed_, static_cast<size_t>(rows) * c.heads * c.head_dim);
    Panels rounded;
    if (layout.kind == CacheKind::q8) rounded = query_panels();
    const auto begin_of = [&](int r) { return window ? std::max(0, rows_[r].origin + 1 - window) : 0; };
    const auto last_of = [&](int r) {
        return window && causal_windows_ ? std::min(rows_[r].last, rows_[r].position) : rows_[r].last;
    };

    // As many rows together as may be, but for tasks that are too few for the threads.
    const int estimate = units * (last_of(rows - 1) / CHUNK - begin_of(rows - 1) / CHUNK + 1);
    int row_tile = std::min(rows, MOST_QUERIES / head_tile);
    if (pool_.threads() > 1) {
        while (row_tile > 1 && estimate * ceil_div(rows, row_tile) < 2 * pool_.threads()) row_tile = ceil_div(row_tile, 2);
    }
    tiles_.clear();
    for (int r = 0; r < rows;) {
        const int begin = r;
        int first = begin_of(r), last = 0;
        for (; r < rows && r - begin < row_tile && rows_[r].share == rows_[begin].share; ++r) {
            first = std::min(first, begin_of(r));
            last = std::max(last, last_of(r));
        }
        tiles_.push_back({begin, r, first / CHUNK, last / CHUNK - first / CHUNK + 1});
    }
    // As many tiles at once as there is room for their partial results.
    for (size_t from = 0; from < tiles_.size();) {
        int chunks = tiles_[from].count;
        size_t to = from + 1;
        const auto fits = [&](const Tile& tile) {
            const size_t more = std::max(chunks, tile.count);
            return (tile.end - tiles_[from].begin) * more * c.heads * layout.padded <= PARTIALS;
        };
        for (; to < tiles_.size() && fits(tiles_[to]); ++to) chunks = std::max(chunks, tiles_[to].count);
        const Tile* tiles = tiles_.data() + from;
        const int n_tiles = static_cast<int>(to - from), first_row = tiles[0].begin, last_row = tiles[n_tiles - 1].end;
        from = to;

        // Partial results of each row and head, chunk after chunk.
        const size_t cells = static_cast<size_t>(last_row - first_row) * c.heads, stride = padded(chunks);
        float* acc = room(acc_, cells * chunks * layout.padded);
        float* largest = room(largest_, cells * stride);
        float* sums = room(sums_, cells * stride);
        const auto finish = [&](int r, int head) {
            const size_t cell = static_cast<size_t>(r - first_row) * c.heads + head;
            const int count = last_of(r) / CHUNK - begin_of(r) / CHUNK + 1;
            kernels_.join(largest + cell * stride, sums + cell * stride, acc + cell * chunks * layout.padded, count, layout,
                          mixed + (static_cast<size_t>(r) * c.heads + head) * c.head_dim);
        };
        const auto task = [&](int unit, int number, const Tile& tile) {
            if (number >= tile.count) return;
            const int kv = unit / head_tiles, first = kv * group + unit % head_tiles * head_tile;
            const int heads = std::min(head_tile, (kv + 1) * group - first), chunk = tile.first + number;
            const auto& blocks = blocks_[rows_[tile.begin].share];
            const Keys keys{layout, blocks.data(), static_cast<int>(blocks.size()), cache_.head_at(layer, kv)};
            Seen seen[MOST_QUERIES];
            Query queries[MOST_QUERIES];
            int n = 0;
            for (int r = tile.begin; r < tile.end; ++r) {
                const Row& row = rows_[r];
                const int begin = std::max(begin_of(r), chunk * CHUNK), end = std::min(last_of(r) + 1, (chunk + 1) * CHUNK);
                if (begin >= end) continue;
                seen[n] = {begin, end, row.direct, paths_.data() + row.path};
                for (int h = 0; h < heads; ++h) {
                    const size_t cell = static_cast<size_t>(r - first_row) * c.heads + first + h;
                    const size_t at = static_cast<size_t>(chunk - begin_of(r) / CHUNK);
                    Query& query = queries[n * heads + h];
                    query = {q_.data() + r * q_stride + static_cast<size_t>(first + h) * c.head_dim, nullptr, nullptr,
                             largest + cell * stride + at, sums + cell * stride + at,
                             acc + (cell * chunks + at) * layout.padded};
                    if (rounded.q) {
                        query.bytes = rounded.q + rounded.q_at(r * c.heads + first + h);
                        query.fields = rounded.meta + rounded.meta_at(r * c.heads + first + h);
                    }
                }
                ++n;
            }
            if (n) kernels_.attend(keys, seen, n, queries, heads);
            if (chunks > 1) return;
            for (int r = tile.begin; r < tile.end; ++r) {
                for (int h = 0; h < heads; ++h) finish(r, first + h);
            }
        };
        // Neighbouring tasks read the same keys. Small tasks go together, or the pool would cost more than they do.
        const auto grain = [](size_t work) { return static_cast<int>(std::max<size_t>(1, SMALL_TASK / (work + 1))); };
        const int positions = chunks > 1 ? CHUNK : last_of(last_row - 1) + 1;
        const size_t queries = static_cast<size_t>(tiles[0].end - tiles[0].begin) * head_tile;
        pool_.split(units * chunks * n_tiles, grain(queries * positions * c.head_dim), [&](int begin, int end) {
            for (int item = begin; item < end; ++item) {
                task(item / (chunks * n_tiles), item / n_tiles % chunks, tiles[item % n_tiles]);
            }
        });
        if (chunks == 1) continue;
        pool_.split(static_cast<int>(cells), grain(static_cast<size_t>(chunks) * c.head_dim), [&](int begin, int end) {
            for (int cell = begin; cell < end; ++cell) finish(first_row + cell / c.heads, cell % c.heads);
        });
    }
}

}  // namespace outpace

#include "cache.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <string>

namespace outpace {
namespace {

// `bytes` zeros, aligned to 64, and 64 bytes behind them that a vector may read. Where blocks are large they take huge
// pages: attention goes through a long cache in pieces of some ten kilobytes, and finding each small page would cost
// as much as reading it.
std::shared_ptr<uint8_t> zeros(size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr size_t HUGE_PAGE = size_t(2) << 20;
    if (bytes >= HUGE_PAGE) {
        const size_t size = bytes + 64 + HUGE_PAGE;
        void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        auto* start = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(at) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
        madvise(start, bytes / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE);  // whole ones only: no memory is wasted
        return std::shared_ptr<uint8_t>(start, [at, size](uint8_t*) { munmap(at, size); });
    }
#endif
    void* memory = std::calloc(bytes + 128, 1);  // pages that are never used cost nothing
    if (!memory) throw std::bad_alloc();
    auto* start = reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
    return std::shared_ptr<uint8_t>(start, [memory](uint8_t*) { std::free(memory); });
}

}  // namespace

HeadLayout::HeadLayout(CacheKind kind, int head_dim, bool unsigned_bytes)
    : kind(kind),
      unsigned_bytes(unsigned_bytes),
      head_dim(head_dim),
      padded((head_dim + 15) / 16 * 16),
      groups((head_dim + GROUP - 1) / GROUP) {
    const size_t size = kind == CacheKind::f32 ? 4 : kind == CacheKind::f16 ? 2 : 1;
    const size_t scales = kind == CacheKind::q8 ? size_t(BLOCK) * groups * sizeof(float) : 0;
    key_scales = BLOCK * size * (kind == CacheKind::q8 ? padded : head_dim);
    values = key_scales + scales;
    value_scales = values + BLOCK * size * padded;
    bytes = value_scales + scales;
}

void HeadLayout::move(const uint8_t* source, int from, uint8_t* target, int to) const {
    // `count` pieces of `size` bytes, `step` bytes apart: the part of a position in one of the arrays.
    const auto pieces = [&](size_t at, size_t size, size_t step, int count) {
        for (int i = 0; i < count; ++i, at += step) std::memcpy(target + at + to * size, source + at + from * size, size);
    };
    const size_t size = kind == CacheKind::f32 ? 4 : 2;
    if (kind == CacheKind::q8) {
        pieces(0, 4, 4 * BLOCK, padded / 4);
        pieces(key_scales, sizeof(float), BLOCK * sizeof(float), groups);
        pieces(values, padded, 0, 1);
        pieces(value_scales, sizeof(float), BLOCK * sizeof(float), groups);
    } else {
        pieces(0, size, size * BLOCK, head_dim);
        pieces(values, size * padded, 0, 1);
    }
}

float HeadLayout::read(const uint8_t* head, int place, bool value, int dim) const {
    const size_t at = value ? static_cast<size_t>(place) * padded + dim
                            : kind == CacheKind::q8 ? static_cast<size_t>(dim / 4 * BLOCK + place) * 4 + dim % 4
                                                    : static_cast<size_t>(dim) * BLOCK + place;
    const uint8_t* part = head + (value ? values : 0);
    if (kind == CacheKind::q8) {
        float scale;
        std::memcpy(&scale, head + (value ? value_scales : key_scales) + sizeof(float) * (dim / GROUP * BLOCK + place), 4);
        const uint8_t flip = unsigned_bytes && !value ? 0x80 : 0;
        return static_cast<float>(static_cast<int8_t>(part[at] ^ flip)) * scale;
    }
    if (kind == CacheKind::f16) {
        uint16_t half;
        std::memcpy(&half, part + 2 * at, 2);
        return half_to_float(half);
    }
    float number;
    std::memcpy(&number, part + 4 * at, 4);
    return number;
}

Cache::Cache(int slots, int positions, int layers, int kv_heads, const HeadLayout& layout)
    : positions_(positions),
      layers_(layers),
      kv_heads_(kv_heads),
      layout_(layout),
      slots_(static_cast<size_t>(slots)) {}

int Cache::vacant() const {
    for (size_t i = 0; i < slots_.size(); ++i) {
        if (!slots_[i].open) return static_cast<int>(i);
    }
    throw Full("all " + std::to_string(slots_.size()) + " slots are taken; free one first");
}

Cache::Slot& Cache::at(int slot) {
    if (slot < 0 || static_cast<size_t>(slot) >= slots_.size() || !slots_[slot].open) {
        throw std::invalid_argument("slot " + std::to_string(slot) + " is not open");
    }
    return slots_[slot];
}

int Cache::open() {
    const int slot = vacant();
    slots_[slot].open = true;
    return slot;
}

void Cache::close(int slot) { at(slot) = Slot(); }

int Cache::fork(int slot) {
    const Slot& from = at(slot);
    const int to = vacant();
    Slot copy;
    copy.open = true;
    copy.length = from.length;
    copy.blocks.assign(from.blocks.begin(), from.blocks.begin() + (from.length + BLOCK - 1) / BLOCK);
    slots_[to] = std::move(copy);
    return to;
}

void Cache::commit(int slot, const std::vector<int>& rows) {
    Slot& s = at(slot);
    int before = -1;
    bool moves = false;
    for (size_t i = 0; i < rows.size(); ++i) {
        const int row = rows[i];
        if (row < 0 || static_cast<size_t>(row) >= s.parents.size() || s.parents[row] != before) {
            throw std::invalid_argument("cannot commit row " + std::to_string(row) + " of slot " + std::to_string(slot) +
                                        ": the rows are no path from the root of its last pass");
        }
        moves |= static_cast<size_t>(row) != i;
        before = row;
    }
    if (moves) {
        own(s, s.length / BLOCK);  // a fork may have taken the last block since the pass
        // A row's parent comes before it, so rows[i] >= i and a row is read before it is overwritten.
        for (size_t i = 0; i < rows.size(); ++i) {
            const int from = s.length + rows[i], to = s.length + static_cast<int>(i);
            if (from == to) continue;
            for (size_t head = 0; head < block_bytes(); head += layout_.bytes) {
                layout_.move(s.blocks[from / BLOCK].get() + head, from % BLOCK, s.blocks[to / BLOCK].get() + head,
                             to % BLOCK);
            }
        }
    }
    s.length += static_cast<int>(rows.size());
    s.parents.clear();
    s.blocks.resize((s.length + BLOCK - 1) / BLOCK);
}

void Cache::truncate(int slot, int length) {
    Slot& s = at(slot);
    if (length < 0 || length > s.length) {
        throw std::invalid_argument("cannot truncate slot " + std::to_string(slot) + " to " + std::to_string(length) +
                                    ": it holds " + std::to_string(s.length) + " rows");
    }
    s.length = length;
    s.parents.clear();
    s.blocks.resize((length + BLOCK - 1) / BLOCK);
}

void Cache::reserve(Slot& slot, int rows) {
    const size_t needed = (static_cast<size_t>(slot.length) + rows + BLOCK - 1) / BLOCK;
    own(slot, slot.length / BLOCK);
    while (slot.blocks.size() < needed) slot.blocks.push_back(block(nullptr));
}

// Copies the blocks from this one on that another slot holds as well.
void Cache::own(Slot& slot, size_t from) {
    for (size_t i = from; i < slot.blocks.size(); ++i) {
        if (slot.blocks[i].use_count() > 1) slot.blocks[i] = block(slot.blocks[i].get());
    }
}

std::shared_ptr<uint8_t> Cache::block(const uint8_t* copy) const {
    std::shared_ptr<uint8_t> made = zeros(block_bytes());
    if (copy) std::memcpy(made.get(), copy, block_bytes());
    return made;
}

size_t Cache::bytes() const {
    std::set<const uint8_t*> held;
    for (const Slot& slot : slots_) {
        for (const auto& b : slot.blocks) held.insert(b.get());
    }
    return held.size() * block_bytes();
}

}  // namespace outpace

#include "cache.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <set>
#include <string>

namespace outpace {

Cache::Cache(int slots, int positions, int layers, int kv_heads, int head_dim)
    : positions_(positions),
      layers_(layers),
      kv_heads_(kv_heads),
      head_dim_(head_dim),
      padded_((head_dim + 15) / 16 * 16),
      head_(static_cast<size_t>(BLOCK) * (head_dim + padded_)),
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
            for (int part = 0; part < layers_ * kv_heads_; ++part) {
                const float* source = s.blocks[from / BLOCK].get() + part * head_;
                float* target = s.blocks[to / BLOCK].get() + part * head_;
                for (int d = 0; d < head_dim_; ++d) target[d * BLOCK + to % BLOCK] = source[d * BLOCK + from % BLOCK];
                const size_t values = static_cast<size_t>(BLOCK) * head_dim_;
                std::memcpy(target + values + static_cast<size_t>(to % BLOCK) * padded_,
                            source + values + static_cast<size_t>(from % BLOCK) * padded_, head_dim_ * sizeof(float));
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

std::shared_ptr<float> Cache::block(const float* copy) const {
    const size_t bytes = head_ * layers_ * kv_heads_ * sizeof(float);
    // calloc: zeros pad the values of an odd head_dim, and pages that are never used cost nothing.
    void* memory = std::calloc(bytes + 64, 1);
    if (!memory) throw std::bad_alloc();
    float* aligned = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
    std::shared_ptr<float> made(aligned, [memory](float*) { std::free(memory); });
    if (copy) std::memcpy(aligned, copy, bytes);
    return made;
}

size_t Cache::bytes() const {
    std::set<const float*> held;
    for (const Slot& slot : slots_) {
        for (const auto& b : slot.blocks) held.insert(b.get());
    }
    return held.size() * head_ * layers_ * kv_heads_ * sizeof(float);
}

}  // namespace outpace

// The KV cache: each slot's keys and values in reference-counted blocks of 64 positions.
//
// A block holds all layers and heads of its positions, so memory grows with use. A fork shares its parent's blocks and a
// block that two slots hold is copied before one of them writes. A pass writes its rows behind the committed ones, row i
// of a share at place length + i; commit moves the rows that stay to where their position says. How a KV head's numbers
// lie within a block, and how they are rounded, is HeadLayout's matter (kernels.h).
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "kernels.h"

namespace outpace {

// No slot, row or position is left for the request.
struct Full : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class Cache {
  public:
    struct Slot {
        bool open = false;
        int length = 0;
        std::vector<int> parents;  // of the pending rows
        std::vector<std::shared_ptr<uint8_t>> blocks;
    };

    Cache(int slots, int positions, int layers, int kv_heads, const HeadLayout& layout);

    // All methods throw std::invalid_argument for a slot that is not open, before anything changes.
    int open();                // throws Full
    void close(int slot);
    int fork(int slot);        // throws Full
    void commit(int slot, const std::vector<int>& rows);
    void truncate(int slot, int length);
    Slot& at(int slot);

    int positions() const { return positions_; }
    const HeadLayout& layout() const { return layout_; }
    // Bytes from a block's start to this layer and KV head.
    size_t head_at(int layer, int kv_head) const {
        return (static_cast<size_t>(layer) * kv_heads_ + kv_head) * layout_.bytes;
    }
    size_t bytes() const;      // held by all slots; a shared block counts once

    // Makes places length .. length + rows writable. Throws std::bad_alloc.
    void reserve(Slot& slot, int rows);

  private:
    std::shared_ptr<uint8_t> block(const uint8_t* copy) const;
    void own(Slot& slot, size_t from);
    int vacant() const;
    size_t block_bytes() const { return layout_.bytes * layers_ * kv_heads_; }

    int positions_, layers_, kv_heads_;
    HeadLayout layout_;
    std::vector<Slot> slots_;
};

}  // namespace outpace

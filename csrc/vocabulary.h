// A vocabulary as files hold it: many short texts in one buffer, and byte-pair encoding over them. Both are made at
// every start, so nothing here makes an object for each of a hundred thousand tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace outpace {

// Texts one behind the other.
class Texts {
  public:
    void add(std::string_view text) {
        bytes_.append(text);
        ends_.push_back(bytes_.size());
    }
    size_t size() const { return ends_.size(); }
    std::string_view operator[](size_t i) const {
        const size_t begin = i ? ends_[i - 1] : 0;
        return {bytes_.data() + begin, ends_[i] - begin};
    }
    std::string_view all() const { return bytes_; }
    bool operator==(const Texts& other) const { return bytes_ == other.bytes_ && ends_ == other.ends_; }
    size_t longest() const;  // bytes
    // No text begins within a character: where all of them together are UTF-8, so is each.
    bool whole_characters() const;

  private:
    std::string bytes_;
    std::vector<size_t> ends_;
};

// Byte-pair encoding (Sennrich, Haddow and Birch 2016, arXiv 1508.07909): of all neighbours the pair with the earliest
// merge is joined first, the leftmost where there are several.
class Bpe {
  public:
    // tokens: by id; they must outlive this. merges: "a b", the earliest first. Throws std::invalid_argument when a
    // token is empty or there twice, or a merge is not two tokens whose union is one.
    Bpe(const Texts& tokens, const Texts& merges);

    // The ids of one word. Characters that are no token leave no trace. ignore_merges: a word that is a token is that.
    std::vector<int> encode(std::string_view word, bool ignore_merges) const;

  private:
    struct Merge { uint64_t pair; int rank, result; };

    int find(std::string_view token) const;        // its id, or -1
    const Merge* find(int left, int right) const;  // or none

    const Texts& tokens_;
    std::vector<int> ids_;       // a hash table with open addressing, of a power of two; -1: free
    std::vector<Merge> merges_;  // the same; rank -1: free
};

}  // namespace outpace

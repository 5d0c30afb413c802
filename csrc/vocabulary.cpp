#include "vocabulary.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

namespace outpace {
namespace {

size_t table_size(size_t entries) {
    size_t size = 16;
    while (size < 2 * entries) size *= 2;
    return size;
}

size_t hashed(uint64_t pair) {
    pair *= 0x9E3779B97F4A7C15u;  // spreads ids, which are small and near each other, over all bits
    return static_cast<size_t>(pair ^ (pair >> 32));
}

uint64_t pair_of(int left, int right) { return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right); }

bool within_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; }

// Bytes of the character of UTF-8 that begins with `first`.
size_t width(char first) {
    const auto byte = static_cast<unsigned char>(first);
    return byte < 0x80 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

}  // namespace

size_t Texts::longest() const {
    size_t most = 0, begin = 0;
    for (const size_t end : ends_) {
        most = std::max(most, end - begin);
        begin = end;
    }
    return most;
}

bool Texts::whole_characters() const {
    size_t begin = 0;
    for (const size_t end : ends_) {
        if (begin < end && within_character(bytes_[begin])) return false;
        begin = end;
    }
    return true;
}

Bpe::Bpe(const Texts& tokens, const Texts& merges)
    : tokens_(tokens), ids_(table_size(tokens.size()), -1), merges_(table_size(merges.size()), Merge{0, -1, -1}) {
    const size_t mask = ids_.size() - 1;
    for (size_t i = 0; i < tokens.size(); ++i) {
        const std::string_view token = tokens[i];
        if (token.empty()) throw std::invalid_argument("a token is empty");
        size_t at = std::hash<std::string_view>()(token) & mask;
        for (; ids_[at] >= 0; at = (at + 1) & mask) {
            if (tokens[static_cast<size_t>(ids_[at])] == token) throw std::invalid_argument("a token is there twice");
        }
        ids_[at] = static_cast<int>(i);
    }
    std::string both;
    for (size_t rank = 0; rank < merges.size(); ++rank) {
        const std::string_view merge = merges[rank];
        const size_t space = merge.find(' ');
        if (space == merge.npos || merge.find(' ', space + 1) != merge.npos) {
            throw std::invalid_argument("a merge is not two tokens with a space between");
        }
        both.assign(merge, 0, space).append(merge, space + 1);
        const int left = find(merge.substr(0, space)), right = find(merge.substr(space + 1)), result = find(both);
        if (left < 0 || right < 0 || result < 0) throw std::invalid_argument("a merge needs a token that does not exist");
        const uint64_t pair = pair_of(left, right);
        size_t at = hashed(pair) & (merges_.size() - 1);
        while (merges_[at].rank >= 0 && merges_[at].pair != pair) at = (at + 1) & (merges_.size() - 1);
        merges_[at] = {pair, static_cast<int>(rank), result};
    }
}

int Bpe::find(std::string_view token) const {
    size_t at = std::hash<std::string_view>()(token) & (ids_.size() - 1);
    while (ids_[at] >= 0 && tokens_[static_cast<size_t>(ids_[at])] != token) at = (at + 1) & (ids_.size() - 1);
    return ids_[at];
}

const Bpe::Merge* Bpe::find(int left, int right) const {
    const uint64_t pair = pair_of(left, right);
    size_t at = hashed(pair) & (merges_.size() - 1);
    while (merges_[at].rank >= 0 && merges_[at].pair != pair) at = (at + 1) & (merges_.size() - 1);
    return merges_[at].rank < 0 ? nullptr : &merges_[at];
}

std::vector<int> Bpe::encode(std::string_view word, bool ignore_merges) const {
    if (const int id = ignore_merges ? find(word) : -1; id >= 0) return {id};
    std::vector<int> parts;
    for (size_t at = 0; at < word.size(); at += width(word[at])) {
        if (const int id = find(word.substr(at, width(word[at]))); id >= 0) parts.push_back(id);
    }
    while (true) {
        const Merge* first = nullptr;
        size_t where = 0;
        for (size_t i = 0; i + 1 < parts.size(); ++i) {
            const Merge* merge = find(parts[i], parts[i + 1]);
            if (merge && (!first || merge->rank < first->rank)) {
                first = merge;
                where = i;
            }
        }
        if (!first) return parts;
        parts[where] = first->result;
        parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(where) + 1);
    }
}

}  // namespace outpace

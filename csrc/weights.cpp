#include "weights.h"

#include <stdexcept>

namespace outpace {

void refuse(const std::string& text) { throw std::invalid_argument(text); }

int within(int value, int low, int high, const char* name) {
    if (value < low || value > high) {
        refuse(std::string(name) + " must be in " + std::to_string(low) + " .. " + std::to_string(high) + ", got " +
               std::to_string(value));
    }
    return value;
}

void Weights::check_new(const std::string& name, bool known) const {
    if (ready_) refuse("the weights are in use: tensor " + name + " comes too late");
    if (known) refuse("tensor " + name + " was already given");
}

void Weights::put_int8(const std::string& name, const int8_t* q, const float* scale, const float* offset, int out,
                       int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, matrices_.count(name));
    matrices_[name] = pack_int8(arena_, q, scale, offset, out, in, unsigned_bytes_);
}

void Weights::put_f32(const std::string& name, const float* w, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, matrices_.count(name));
    matrices_[name] = pack_f32(arena_, w, out, in);
}

void Weights::put_16(const std::string& name, const uint16_t* w, Matrix::Kind kind, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, matrices_.count(name));
    matrices_[name] = pack_16(arena_, w, kind, out, in);
}

void Weights::put_super(const std::string& name, const Supers& from, Matrix::Kind kind, int out, int in) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, matrices_.count(name));
    matrices_[name] = pack_super(arena_, from, kind, out, in);
}

void Weights::put_packed(const std::string& name, const Matrix& like, const uint8_t* data, size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, matrices_.count(name));
    matrices_[name] = place(like, data, bytes, unsigned_bytes_);
    placed_ += bytes;
}

void Weights::put_vector(const std::string& name, const float* v, int n) {
    std::lock_guard<std::mutex> lock(mutex_);
    check_new(name, vectors_.count(name));
    vectors_[name].assign(v, v + n);
}

void Weights::forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (ready_) refuse("the weights are in use");
    matrices_.clear();
    vectors_.clear();
    placed_ = 0;
}

Matrix Weights::take(const std::string& name, int out, int in) const {
    const auto found = matrices_.find(name);
    if (found == matrices_.end()) refuse("tensor " + name + " is missing");
    const Matrix& m = found->second;
    if (m.out != out || m.in != in) {
        refuse("tensor " + name + " has shape [" + std::to_string(m.out) + ", " + std::to_string(m.in) +
               "], expected [" + std::to_string(out) + ", " + std::to_string(in) + "]");
    }
    return m;
}

const float* Weights::maybe_vector(const std::string& name, int n) const {
    const auto found = vectors_.find(name);
    if (found == vectors_.end()) return nullptr;
    if (found->second.size() != static_cast<size_t>(n)) {
        refuse("tensor " + name + " has " + std::to_string(found->second.size()) + " values, expected " +
               std::to_string(n));
    }
    return found->second.data();
}

const float* Weights::take_vector(const std::string& name, int n) const {
    const float* v = maybe_vector(name, n);
    if (!v) refuse("tensor " + name + " is missing");
    return v;
}

Weights::Linear Weights::linear(const std::string& name, int out, int in) const {
    return {take(name + ".weight", out, in), maybe_vector(name + ".bias", out)};
}

}  // namespace outpace

// A network's tensors by name, from the call that brings them to the parts that use them.
//
// Names are those of src/outpace/models/names.py and heads/config.py. Neighbours: matrix.h lays matrices out, stack.h
// takes them. All methods throw std::invalid_argument for a tensor that does not fit, before anything changes.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "matrix.h"

namespace outpace {

[[noreturn]] void refuse(const std::string& text);  // throws std::invalid_argument
// The value; refused unless it is in low .. high.
int within(int value, int low, int high, const char* name);

class Weights {
  public:
    // mutex: held while a tensor is put in. unsigned_bytes: as pack_int8.
    Weights(std::mutex& mutex, bool unsigned_bytes) : mutex_(mutex), unsigned_bytes_(unsigned_bytes) {}
    Weights(const Weights&) = delete;

    // Pointers as in matrix.h; nothing is kept of them.
    void put_int8(const std::string& name, const int8_t* q, const float* scale, const float* offset, int out, int in);
    void put_f32(const std::string& name, const float* w, int out, int in);
    void put_16(const std::string& name, const uint16_t* w, Matrix::Kind kind, int out, int in);
    void put_super(const std::string& name, const Supers& from, Matrix::Kind kind, int out, int in);
    void put_vector(const std::string& name, const float* v, int n);
    // A packed matrix whose bytes outlive these weights (matrix.h, `place`).
    void put_packed(const std::string& name, const Matrix& like, const uint8_t* data, size_t bytes);
    void forget();  // all tensors, while they are not in use
    // The tensors as they are held, to be kept in a file.
    const std::map<std::string, Matrix>& matrices() const { return matrices_; }
    const std::map<std::string, std::vector<float>>& vectors() const { return vectors_; }
    size_t weight_bytes() const { return arena_.bytes() + placed_; }

  protected:
    // A linear layer: y = x * w^T + bias.
    struct Linear {
        Matrix w;
        const float* bias = nullptr;
    };
    bool has(const std::string& name) const { return matrices_.count(name) || vectors_.count(name); }
    Matrix take(const std::string& name, int out, int in) const;
    const float* take_vector(const std::string& name, int n) const;
    const float* maybe_vector(const std::string& name, int n) const;
    Linear linear(const std::string& name, int out, int in) const;

    std::mutex& mutex_;
    bool ready_ = false;  // in use: nothing more is put in

  private:
    void check_new(const std::string& name, bool known) const;

    const bool unsigned_bytes_;
    Arena arena_;
    size_t placed_ = 0;  // bytes of matrices that lie elsewhere
    std::map<std::string, Matrix> matrices_;
    std::map<std::string, std::vector<float>> vectors_;
};

}  // namespace outpace

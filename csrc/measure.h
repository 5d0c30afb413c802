// What `outpace bench` needs from the core: where the time of a pass goes, and what the machine could do at best.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "matrix.h"
#include "pool.h"

namespace outpace {

// Adds up the time that passes spend in their stages. Off, a change of stage costs one test of a flag.
class StageClock {
  public:
    enum Stage { REST, PROJECTIONS, ATTENTION, MLP, HEAD, STAGES };

    // Starts from zero.
    void set(bool on) {
        on_ = on;
        seconds_.fill(0);
    }
    // A pass begins, with REST.
    void start() {
        if (!on_) return;
        stage_ = REST;
        since_ = Clock::now();
    }
    // The time since the last call belongs to the stage that ends here.
    void enter(Stage stage) {
        if (!on_) return;
        const auto now = Clock::now();
        seconds_[stage_] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
        stage_ = stage;
    }
    const std::array<double, STAGES>& seconds() const { return seconds_; }

  private:
    using Clock = std::chrono::steady_clock;
    bool on_ = false;
    Stage stage_ = REST;
    Clock::time_point since_;
    std::array<double, STAGES> seconds_{};
};

// A buffer that threads read from end to end as fast as memory gives it. Throws std::invalid_argument, std::bad_alloc.
class Reader {
  public:
    Reader(size_t bytes, int threads);
    size_t bytes() const { return part_ * static_cast<size_t>(parts_); }  // nearly what was asked for
    void read();

  private:
    Pool pool_;
    Arena arena_;
    int parts_;
    size_t part_;
    uint8_t* data_;
};

// 8-bit multiplications and additions a second (each counted) of the dot-product instruction that the kernel family
// `isa` uses, on registers alone, by `threads` threads: the fastest of repetitions that take `seconds` together. 0 where
// this family has none that is measured. Throws std::invalid_argument.
double int8_peak(const char* isa, int threads, double seconds);

}  // namespace outpace

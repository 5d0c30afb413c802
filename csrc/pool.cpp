#include "pool.h"

#include <new>

#ifndef _WIN32
#include <pthread.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace outpace {
namespace {

constexpr int SPINS = 400;  // pauses before a thread stops waiting actively: tens of microseconds

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

std::atomic<int> Pool::forks_{0};

Pool::Pool(int threads) : born_(forks_.load()) {
#ifndef _WIN32
    static const int watched = pthread_atfork(nullptr, nullptr, [] { forks_.fetch_add(1); });
    if (watched != 0) throw std::bad_alloc();
#endif
    try {
        for (int i = 1; i < threads; ++i) workers_.emplace_back([this] { work(); });
    } catch (...) {
        stop();
        throw;
    }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
    if (forks_.load() != born_) {  // the threads are the parent's: there is nothing to join, and nobody to wake
        new std::vector<std::thread>(std::move(workers_));
        sleep_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(sleep_->mutex);
        stop_.store(true);
    }
    sleep_->wake.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
}

void Pool::dispatch(int n, Call call, const void* self) {
    const uint64_t number = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    Job& job = jobs_[number & 1];
    job.call.store(call, std::memory_order_relaxed);
    job.self.store(self, std::memory_order_relaxed);
    job.tasks.store(n, std::memory_order_relaxed);
    job.done.store(0, std::memory_order_relaxed);
    state_.store(number << 32, std::memory_order_seq_cst);
    if (parked_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(sleep_->mutex);
        sleep_->wake.notify_all();
    }
    while (take_one(state_.load(std::memory_order_acquire))) {
    }
    for (int spin = 0; job.done.load(std::memory_order_acquire) < n; ++spin) {
        if (spin < SPINS) {
            pause();
        } else {
            std::this_thread::yield();
        }
    }
}

// Claims and runs one task of the job that `state` names; true when there may be more.
bool Pool::take_one(uint64_t state) {
    Job& job = jobs_[(state >> 32) & 1];
    const int task = static_cast<int>(state & 0xffffffffu);
    const Call call = job.call.load(std::memory_order_relaxed);
    const void* self = job.self.load(std::memory_order_relaxed);
    if (task >= job.tasks.load(std::memory_order_relaxed)) return false;
    if (state_.compare_exchange_strong(state, state + 1, std::memory_order_acq_rel)) {
        call(self, task);
        job.done.fetch_add(1, std::memory_order_acq_rel);
    }
    return true;
}

void Pool::work() {
    while (!stop_.load(std::memory_order_relaxed)) {
        uint64_t state = state_.load(std::memory_order_acquire);
        if (take_one(state)) continue;
        const auto idle = [&] {
            return state_.load(std::memory_order_seq_cst) >> 32 == state >> 32 && !stop_.load(std::memory_order_relaxed);
        };
        for (int spin = 0; spin < SPINS && idle(); ++spin) pause();
        if (!idle()) continue;
        // Where others want the core, a thread that yields waits behind them for milliseconds; one that sleeps is let in
        // as soon as it is woken.
        std::unique_lock<std::mutex> lock(sleep_->mutex);
        parked_.fetch_add(1, std::memory_order_seq_cst);
        sleep_->wake.wait(lock, [&] { return !idle(); });
        parked_.fetch_sub(1, std::memory_order_seq_cst);
    }
}

}  // namespace outpace

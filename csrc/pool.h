// A small thread pool for the stages of one forward pass.
//
// A pass is a few hundred stages of some ten microseconds each, so a sleeping pool would cost more than the work: the
// workers spin between stages, for a bounded time, then park until there is work. The caller takes tasks itself and waits
// only for tasks that a worker has begun, so a worker that the system has set aside costs little.
// A forked child has no workers: there the caller does everything.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace outpace {

class Pool {
  public:
    // threads: 1 to 256, the caller's own included. Throws std::system_error when a thread cannot be started.
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return static_cast<int>(workers_.size()) + 1; }

    // Runs task(i) for every i in [0, n), in any order on any thread, and returns when all are done. Tasks must not
    // throw. One caller at a time.
    template <class Task> void run(int n, const Task& task) {
        if (n <= 1 || alone()) {
            for (int i = 0; i < n; ++i) task(i);
            return;
        }
        dispatch(n, [](const void* self, int i) { (*static_cast<const Task*>(self))(i); }, &task);
    }

    // Cuts [0, items) into contiguous ranges of at least `grain` items and runs task(begin, end) on each.
    template <class Task> void split(int items, int grain, const Task& task) {
        const int most = (items + grain - 1) / grain;
        const int wanted = workers_.empty() ? 1 : 4 * threads();
        const int parts = most < wanted ? most : wanted;
        run(parts, [&](int i) {
            const auto at = [&](int part) { return static_cast<int>(static_cast<int64_t>(items) * part / parts); };
            task(at(i), at(i + 1));
        });
    }

  private:
    using Call = void (*)(const void*, int);
    // Jobs alternate between two places, so that a late worker never reads one that is being written: it can claim a
    // task only while `state_` still holds the job's number.
    struct alignas(64) Job {
        std::atomic<Call> call{nullptr};
        std::atomic<const void*> self{nullptr};
        std::atomic<int> tasks{0};
        std::atomic<int> done{0};
    };

    // What the workers sleep on. On the heap, because in a forked child it can neither be used nor be destroyed.
    struct Sleep {
        std::mutex mutex;
        std::condition_variable wake;
    };

    bool alone() const { return workers_.empty() || forks_.load(std::memory_order_relaxed) != born_; }
    void dispatch(int n, Call call, const void* self);
    bool take_one(uint64_t state);
    void work();
    void stop();

    Job jobs_[2];
    alignas(64) std::atomic<uint64_t> state_{0};  // job number << 32 | next task
    alignas(64) std::atomic<int> parked_{0};
    std::atomic<bool> stop_{false};
    static std::atomic<int> forks_;  // in this process and its ancestors
    const int born_;
    std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
    std::vector<std::thread> workers_;
};

}  // namespace outpace

#include "parallel.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace specdec {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto AWAKE = std::chrono::milliseconds(3);  // how long a thread looks for the next call

// Waiting: some microseconds of spinning, then the core is given away, another program may need it.
class Patience {
 public:
  void wait() {
    if (spins_ < SPINS) relax(), spins_++;
    else std::this_thread::yield();
  }
  bool spins() const { return spins_ < SPINS; }

 private:
  static constexpr int SPINS = 2000;
  static void relax() {
#if defined(__SSE2__)
    _mm_pause();
#endif
  }
  int spins_ = 0;
};

class Pool {
 public:
  void run(Steps&& steps) {
    const std::lock_guard<std::mutex> turn(turn_);
    grow(steps.n_threads);
    const auto shared = std::make_shared<Steps>(std::move(steps));
    {
      const std::lock_guard<std::mutex> lock(lock_);
      latest_ = shared;
      call_.fetch_add(1);
    }
    if (sleepers_.load()) wake_.notify_all();
    shared->take_part(0);
  }

 private:
  // Makes sure that there are n_threads - 1 threads; with fewer the steps run all the same.
  void grow(int n_threads) {
    if (n_workers_ >= n_threads - 1) return;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
    try {
      for (; n_workers_ < n_threads - 1; n_workers_++)
        std::thread(&Pool::serve, this, n_workers_ + 1, call_.load()).detach();
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // What a thread does: takes part in the latest call, again and again.
  void serve(int index, uint64_t seen) {
    while (true) {
      await_call(seen);
      std::shared_ptr<Steps> steps;
      {
        const std::lock_guard<std::mutex> lock(lock_);
        steps = latest_;
        seen = call_.load();
      }
      if (index < steps->n_threads) steps->take_part(index);
    }
  }

  void await_call(uint64_t seen) {
    Patience patience;
    for (; patience.spins(); patience.wait())
      if (call_.load() != seen) return;
    for (const auto started = Clock::now(); Clock::now() - started < AWAKE; patience.wait())
      if (call_.load() != seen) return;
    std::unique_lock<std::mutex> lock(lock_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return call_.load() != seen; });
    sleepers_.fetch_sub(1);
  }

  std::mutex turn_, lock_;
  std::condition_variable wake_;
  std::shared_ptr<Steps> latest_;
  std::atomic<uint64_t> call_{0};
  std::atomic<int> sleepers_{0};
  int n_workers_ = 0;
};

// The threads of this process. A child after fork() has none of its parent's and makes its own. Never
// destroyed: threads may wait in it until the process ends.
Pool& shared_pool() {
  static std::mutex mutex;
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) pool = new Pool, owner = getpid();
  return *pool;
}

}  // namespace

void Steps::take_part(int index) {
  for (Step& step : steps_) {
    for (int64_t chunk; (chunk = step.take(index)) < step.n_chunks;) {
      step.work(part_of(step.count(), chunk, step.n_chunks), index);
      step.done.fetch_add(1, std::memory_order_release);
    }
    for (Patience patience; step.done.load(std::memory_order_acquire) < step.n_chunks;)
      patience.wait();
  }
}

void run_steps(Steps&& steps) {
  if (steps.n_threads > 1) shared_pool().run(std::move(steps));
  else steps.take_part(0);
}

}  // namespace specdec

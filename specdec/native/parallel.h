// A team of threads that works through the steps of one call together.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#if defined(_OPENMP)
#include <omp.h>
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace specdec {

struct Range {
  int64_t first, last;
};

class Team {
 public:
  // Returns when all `size` threads have called it. Spins for some microseconds, then gives the
  // core away: another program may be using it.
  void wait(int size) {
    if (size == 1) return;
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++)
      spins < SPINS ? relax() : std::this_thread::yield();
  }

 private:
  static constexpr int SPINS = 2000;
  static void relax() {
#if defined(__SSE2__)
    _mm_pause();
#endif
  }

  std::atomic<int> arrived_{0};
  std::atomic<int> round_{0};
};

// One thread of a team.
struct Worker {
  Team& team;
  int index, size;

  void wait() const { team.wait(size); }

  // This thread's share of `count` items.
  Range share(int64_t count) const {
    return {count * index / size, count * (index + 1) / size};
  }
};

// Runs work(Worker) on up to n_threads threads.
template <class Work>
void run_team(int n_threads, const Work& work) {
  Team team;
#if defined(_OPENMP)
#pragma omp parallel num_threads(n_threads) if (n_threads > 1)
  work(Worker{team, omp_get_thread_num(), omp_get_num_threads()});
#else
  (void)n_threads;
  work(Worker{team, 0, 1});
#endif
}

}  // namespace specdec

// Work in steps, each shared out among threads in chunks.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

namespace specdec {

struct Range {
  int64_t first, last;
};

// Part `index` of `count` items in `parts` nearly equal ones.
inline Range part_of(int64_t count, int64_t index, int64_t parts) {
  return {count * index / parts, count * (index + 1) / parts};
}

// One step: its chunks may run in any order on any thread, after all chunks of the step before. A
// thread begins with a share of its own, chunks that follow each other, so that memory is read in
// order; then it helps with those of others.
class Step {
 public:
  Step(std::function<int64_t()> count, int64_t n_chunks, int n_shares,
       std::function<void(Range, int)> work)
      : count(std::move(count)), n_chunks(n_chunks), work(std::move(work)), shares_(n_shares) {
    for (int i = 0; i < n_shares; i++) {
      const Range range = part_of(n_chunks, i, n_shares);
      shares_[i].next = range.first, shares_[i].end = range.last;
    }
  }

  // A chunk that nobody has taken, or n_chunks.
  int64_t take(int index) {
    const size_t n = shares_.size();
    for (size_t i = 0; i < n; i++) {
      Share& share = shares_[(index + i) % n];
      if (share.next.load(std::memory_order_relaxed) >= share.end) continue;
      const int64_t chunk = share.next.fetch_add(1, std::memory_order_relaxed);
      if (chunk < share.end) return chunk;
    }
    return n_chunks;
  }

  const std::function<int64_t()> count;  // asked when the step before is done
  const int64_t n_chunks;
  const std::function<void(Range, int)> work;  // (items, index of the thread)
  alignas(64) std::atomic<int64_t> done{0};

 private:
  struct Share {
    alignas(64) std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Share> shares_;
};

class Steps {
 public:
  explicit Steps(int n_threads) : n_threads(n_threads) {}

  // A step over `count` items in a few chunks for every thread.
  void add(int64_t count, std::function<void(Range, int)> work) {
    const int64_t n_chunks = count < most_chunks() ? count : most_chunks();
    steps_.emplace_back([count] { return count; }, n_chunks, n_threads, std::move(work));
  }

  // A step whose number of items depends on what the steps before it write.
  void add_late(std::function<int64_t()> count, std::function<void(Range, int)> work) {
    steps_.emplace_back(std::move(count), most_chunks(), n_threads, std::move(work));
  }

  // Takes part in all steps as thread number `index`; returns when the last one is done. What a step's
  // work refers to is touched only while chunks are left.
  void take_part(int index);

  const int n_threads;

 private:
  static constexpr int64_t CHUNKS = 4;
  int64_t most_chunks() const { return n_threads == 1 ? 1 : CHUNKS * n_threads; }
  std::deque<Step> steps_;
};

// Runs the steps on up to steps.n_threads threads, the caller's being one of them. Threads are kept for
// the next call, calls from several threads take turns. A thread that gets no core is not waited for
// unless it has a chunk in hand: others do its share.
void run_steps(Steps&& steps);

}  // namespace specdec

// Threads that share the parts of one large read of the SSD: a row that is on the disk alone takes a disk's time,
// during which others can be asked for. The caller does its share. They are started when they are first wanted.
//
// Thread-safe: reads of several callers are served side by side.
#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "util/mutex.h"

namespace sparserow {

// This thread works for the SSD from now on: behind those that serve rows in memory, but not so far behind that rows
// could not leave memory while all CPUs are busy.
void take_ssd_priority() noexcept;

class SsdReaders {
 public:
  explicit SsdReaders(std::size_t most_threads) noexcept : most_threads_(most_threads) {}
  SsdReaders(const SsdReaders&) = delete;
  SsdReaders& operator=(const SsdReaders&) = delete;
  ~SsdReaders();  // no thread may be in run()

  // Calls work(part) for each part below `parts`, each once, by up to `helpers` threads and by the caller; returns when
  // all have returned. It may not throw.
  void run(std::size_t parts, std::size_t helpers, const std::function<void(std::size_t part)>& work);

 private:
  struct Job {
    const std::function<void(std::size_t)>* work;
    std::size_t parts;
    std::atomic<std::size_t> next{0};
    std::size_t places = 0;   // for more helpers; guarded by mutex_
    std::size_t helpers = 0;  // at work; guarded by mutex_
  };

  static void work_on(Job& job);
  void help();
  void start(std::size_t threads) SR_REQUIRES(mutex_);

  const std::size_t most_threads_;
  Mutex mutex_;
  CondVar asked_;
  CondVar left_;
  std::deque<std::shared_ptr<Job>> jobs_ SR_GUARDED_BY(mutex_);  // that have parts left, perhaps, and places
  bool is_ending_ SR_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // guarded by mutex_ until they end
};

}  // namespace sparserow

// The phase-fair lock: who waits for whom, by the lock's own order and not by time.
#include "util/fair_mutex.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

namespace sparserow {
namespace {

void wait_for(const auto& condition) {
  while (!condition()) std::this_thread::yield();
}

TEST_CASE("readers have the lock together, a writer has it alone") {
  FairMutex mutex;
  mutex.lock_shared();
  std::thread([&mutex] {
    CHECK_FALSE(mutex.try_lock());
    mutex.lock_shared();
    mutex.unlock_shared();
  }).join();
  CHECK_FALSE(mutex.has_writer());
  mutex.unlock_shared();
  REQUIRE(mutex.try_lock());
  std::thread([&mutex] { CHECK_FALSE(mutex.try_lock()); }).join();
  mutex.unlock();
  mutex.lock();
  mutex.unlock();
  CHECK_FALSE(mutex.has_writer());
}

TEST_CASE("a reader that comes after a waiting writer waits for it, and goes before the next writer") {
  FairMutex mutex;
  std::vector<int> order;  // guarded by the lock, or by what follows what
  mutex.lock_shared();
  std::thread first([&] {
    const std::unique_lock lock(mutex);
    order.push_back(1);
  });
  wait_for([&] { return mutex.has_writer(); });
  std::atomic<bool> reader_is_in = false;
  std::thread reader([&] {
    const std::shared_lock lock(mutex);
    reader_is_in = true;
    order.push_back(2);
  });
  wait_for([&] { return mutex.readers() == 2; });
  std::thread second([&] {
    const std::unique_lock lock(mutex);
    order.push_back(3);
  });
  wait_for([&] { return mutex.writers() == 2; });
  for (int i = 0; i < 1000; ++i) std::this_thread::yield();
  CHECK_FALSE(reader_is_in);
  CHECK(order.empty());
  mutex.unlock_shared();
  first.join();
  reader.join();
  second.join();
  CHECK(order == std::vector{1, 2, 3});
}

TEST_CASE("while a writer waits, each reader passes at most once more") {
  FairMutex mutex;
  constexpr int kReaders = 4, kWrites = 2000;
  std::atomic<bool> stops = false;
  std::atomic<std::uint64_t> passes = 0;
  std::uint64_t value = 0, torn = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < kReaders; ++i) {
    readers.emplace_back([&] {
      while (!stops) {
        mutex.lock_shared();
        if (mutex.has_writer()) ++passes;  // it came before the writer, or in the phase after one
        mutex.unlock_shared();
      }
    });
  }
  std::uint64_t most = 0;
  for (int i = 0; i < kWrites; ++i) {
    const std::uint64_t before = passes;
    mutex.lock();
    most = std::max<std::uint64_t>(most, passes - before);
    torn += value != static_cast<std::uint64_t>(i);
    ++value;
    mutex.unlock();
  }
  stops = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(torn == 0);
  CHECK(most <= 2 * kReaders);  // the phase before, whose readers may still note it, and the one that it waits for
}

TEST_CASE("many writers and readers lose no write") {
  FairMutex mutex;
  constexpr int kThreads = 6, kRounds = 5000;
  std::uint64_t value = 0, other = 0;
  std::atomic<std::uint64_t> torn = 0, tried = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round) {
        if (i % 3 == 0) {
          const std::unique_lock lock(mutex);
          ++value;
          ++other;
        } else if (i % 3 == 1) {
          std::unique_lock lock(mutex, std::try_to_lock);
          if (!lock.owns_lock()) continue;
          ++value;
          ++other;
          ++tried;
        } else {
          const std::shared_lock lock(mutex);
          torn += value != other;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(torn == 0);
  CHECK(value == 2 * kRounds + tried);
  CHECK(value == other);
}

TEST_CASE("a thread that takes the lock twice ends, where locks are checked") {
#ifdef SPARSEROW_CHECK_LOCKS
  for (const bool is_shared : {false, true}) {
    const pid_t child = ::fork();
    if (child == 0) {
      std::freopen("/dev/null", "w", stderr);
      std::signal(SIGABRT, SIG_DFL);
      FairMutex mutex;
      mutex.lock_shared();
      is_shared ? mutex.lock_shared() : mutex.lock();
      ::_exit(0);
    }
    int status = 0;
    REQUIRE(::waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    CHECK(WTERMSIG(status) == SIGABRT);
  }
#endif
}

}  // namespace
}  // namespace sparserow

// Keys that clients say they will pull: their rows come to memory one slice after the other, on one of the threads that
// wait for the SSD at a time, so that hints never keep requests from it for longer than a slice.
//
// While reads of the SSD do not wait for the disk it declines all keys: a hint would cost CPU time and hide nothing.
// Pulls go on showing the store whether reads wait.
//
// Thread-safe. The pool must be joined, after stop(), before the object goes.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "rpc/transport/event_loop.h"
#include "store/store.h"

namespace sparserow::rpc {

class HintQueue {
 public:
  static constexpr std::uint64_t kMostKeys = 1u << 18;  // that wait; more are dropped
  static constexpr std::size_t kSlice = 1024;           // keys brought at once

  HintQueue(Store& store, asio::thread_pool& disk) : store_(store), strand_(asio::make_strand(disk.get_executor())) {}

  // Returns how many keys it took: from the first on, as many as there is room for; 0 while reads do not wait.
  std::uint64_t take(std::uint32_t table_id, std::span<const std::uint64_t> keys);
  void stop() noexcept { stopped_ = true; }  // what waits is forgotten
  [[nodiscard]] std::uint64_t taken() const noexcept { return taken_; }
  [[nodiscard]] std::uint64_t dropped() const noexcept { return dropped_; }
  [[nodiscard]] std::uint64_t declined() const noexcept { return declined_; }

 private:
  Store& store_;
  asio::strand<asio::thread_pool::executor_type> strand_;
  std::atomic<bool> stopped_{false};
  std::atomic<std::uint64_t> waiting_{0}, taken_{0}, dropped_{0}, declined_{0};
};

}  // namespace sparserow::rpc

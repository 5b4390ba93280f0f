// How long requests took in this server: from the header read until the reply was handed to the socket.
//
// Thread-safe, without locks: a request costs two relaxed additions.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <string_view>

#include "rpc/wire/frame.h"

namespace sparserow::rpc {

class RequestTimes {
 public:
  enum class Kind : std::uint8_t { kPull, kWaitedPull, kLookup, kCommit, kWrite, kScan, kOther };
  static constexpr std::array<std::string_view, 7> kNames = {"pull",  "pull_waited", "lookup", "commit",
                                                             "write", "scan",        "other"};  // in the order of Kind
  // Upper bounds of the buckets in microseconds, inclusive; one more bucket holds all above.
  static constexpr std::array<std::uint32_t, 20> kBoundsUs = {
      5,      10,     20,     50,      100,     200,     500,       1'000,     2'000,     5'000,
      10'000, 20'000, 50'000, 100'000, 200'000, 500'000, 1'000'000, 2'000'000, 5'000'000, 10'000'000};

  struct Counts {
    std::array<std::uint64_t, kBoundsUs.size() + 1> requests{};
    std::uint64_t sum_ns = 0;
  };
  using All = std::array<Counts, kNames.size()>;

  static Kind kind_of(FrameType type) noexcept {
    switch (type) {
      case FrameType::kPull:
        return Kind::kPull;
      case FrameType::kLookup:
        return Kind::kLookup;
      case FrameType::kPrepare:
      case FrameType::kCommit:
        return Kind::kCommit;
      case FrameType::kAssign:
      case FrameType::kDelete:
        return Kind::kWrite;
      case FrameType::kScan:
        return Kind::kScan;
      default:
        return Kind::kOther;
    }
  }

  void add(Kind kind, std::chrono::nanoseconds time) noexcept {
    const auto ns = static_cast<std::uint64_t>(std::max<std::int64_t>(0, time.count()));
    const auto bucket =
        static_cast<std::size_t>(std::ranges::lower_bound(kBoundsUs, (ns + 999) / 1000) - kBoundsUs.begin());
    Cell& cell = cells_[static_cast<std::size_t>(kind)];
    cell.requests[bucket].fetch_add(1, std::memory_order_relaxed);
    cell.sum_ns.fetch_add(ns, std::memory_order_relaxed);
  }

  [[nodiscard]] All all() const noexcept {
    All out{};
    for (std::size_t kind = 0; kind < out.size(); ++kind) {
      for (std::size_t bucket = 0; bucket <= kBoundsUs.size(); ++bucket) {
        out[kind].requests[bucket] = cells_[kind].requests[bucket].load(std::memory_order_relaxed);
      }
      out[kind].sum_ns = cells_[kind].sum_ns.load(std::memory_order_relaxed);
    }
    return out;
  }

 private:
  struct alignas(64) Cell {
    std::array<std::atomic<std::uint64_t>, kBoundsUs.size() + 1> requests{};
    std::atomic<std::uint64_t> sum_ns{0};
  };
  std::array<Cell, kNames.size()> cells_;
};

}  // namespace sparserow::rpc

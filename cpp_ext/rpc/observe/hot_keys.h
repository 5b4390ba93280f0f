// Which keys are asked for most: a sample of the keys of pulls and lookups, counted by Space-Saving.
//
// Space-Saving (Metwally, Agrawal & El Abbadi, "Efficient computation of frequent and top-k elements in data streams",
// ICDT 2005): a fixed number of counters; a key without one takes the smallest over, with its count as the error. Any
// key whose share of the sample is above 1/kCounters has a counter, and a count is too high by at most its error. When
// the sample has kWindow keys all counts are halved, so that what was hot an hour ago fades.
//
// One key in kStride on average is looked at, after gaps of random length; a key costs its request about a nanosecond.
// Thread-safe; a thread that finds another one counting drops its sample instead of waiting.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "util/mutex.h"

namespace sparserow::rpc {

struct HotKey {
  std::uint32_t table_id = 0;
  std::uint64_t key = 0;
  std::uint64_t count = 0;  // of samples
  std::uint64_t error = 0;  // by which the count may be too high
};

class HotKeys {
 public:
  static constexpr std::uint32_t kCounters = 1024;
  static constexpr std::uint32_t kStride = 256;
  static constexpr std::uint64_t kWindow = 1u << 16;

  // Where the next sample of one stream of keys lies. Belongs to one thread at a time.
  class Sampler {
   public:
    explicit Sampler(std::uint64_t seed) noexcept;

   private:
    friend class HotKeys;
    std::uint32_t gap() noexcept;  // uniform in [1, 2 * kStride - 1]
    std::uint64_t state_;
    std::size_t skip_;
  };

  // Counts the sampled ones among the keys of a request.
  void look_at(Sampler& sampler, std::uint32_t table_id, std::span<const std::uint64_t> keys);
  // Counts one key.
  void add(std::uint32_t table_id, std::uint64_t key);

  struct Report {
    std::uint64_t samples = 0;  // in the window
    std::vector<HotKey> keys;   // by falling count
  };
  [[nodiscard]] Report report(std::size_t most) const;

 private:
  void count(std::uint32_t table_id, std::uint64_t key) SR_REQUIRES(mutex_);
  void sink(std::size_t at) SR_REQUIRES(mutex_);
  void place(std::size_t at, const HotKey& entry) SR_REQUIRES(mutex_);

  struct Name {
    std::uint64_t key;
    std::uint32_t table_id;
    bool operator==(const Name&) const = default;
  };
  struct NameHash {
    std::size_t operator()(const Name& name) const noexcept;
  };

  mutable Mutex mutex_;
  std::uint64_t samples_ SR_GUARDED_BY(mutex_) = 0;
  std::vector<HotKey> heap_ SR_GUARDED_BY(mutex_);  // the smallest count first
  std::unordered_map<Name, std::size_t, NameHash> places_ SR_GUARDED_BY(mutex_);
};

}  // namespace sparserow::rpc

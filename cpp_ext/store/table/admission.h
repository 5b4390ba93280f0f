// Which keys get a row: a table's memory of pushes of keys that have none.
//
// With admit_after = n each slot has a filter of the keys that it saw less than n times, so that it can go with its
// slot's rows; a key that gets its row leaves it. With admit_probability nothing is kept: the coin is a pure function
// of (seed, table, key, observation), where the observation is the step of the push, or what else numbers it.
//
// The filter keeps 24 bits of a key's hash and 8 of its count in cells that grow with the keys (at most 7 of 8 are
// full). A new key is taken for another one with probability entries / 2^24. When it is full (admit_capacity / slots
// entries) all counts are halved, and those at 0 are forgotten: what was seen once goes first.
//
// Guarded by the stripe's lock, exclusive for admit() and load(); the totals are atomic.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "schema/schema.h"
#include "store/table/slot_order.h"
#include "util/status.h"

namespace sparserow {

// Counts of up to `most` ids of kIdBits bits, by open addressing. Owns its cells.
template <unsigned kIdBits>
class CountingFilter {
 public:
  static constexpr std::uint32_t kMostCount = 255;

  // One more observation of an id; returns how many there were, this one with them, at most kMostCount.
  std::uint32_t raise(std::uint32_t id, std::uint32_t most);
  [[nodiscard]] std::uint32_t count(std::uint32_t id) const noexcept;
  void erase(std::uint32_t id) noexcept;

  [[nodiscard]] std::uint32_t entries() const noexcept { return entries_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return std::uint64_t{capacity_} * sizeof(std::uint32_t); }
  // (id << 8 | count) of all entries, ascending; and back, with InvalidArgument for what is none.
  [[nodiscard]] std::vector<std::uint32_t> entries_sorted() const;
  Status load(std::span<const std::uint32_t> entries);
  [[nodiscard]] CountingFilter copy() const;

 private:
  static_assert(kIdBits <= 24);
  static constexpr std::uint32_t kNowhere = ~std::uint32_t{0};

  [[nodiscard]] std::uint32_t home(std::uint32_t id) const noexcept {
    return static_cast<std::uint32_t>((std::uint64_t{id} * capacity_) >> kIdBits);
  }
  [[nodiscard]] std::uint32_t place_of(std::uint32_t id) const noexcept;  // kNowhere when it is not there
  void put(std::uint32_t cell) noexcept;
  void rebuild(const std::vector<std::uint32_t>& cells, std::uint32_t capacity);
  void age();

  std::unique_ptr<std::uint32_t[]> cells_;  // id << 8 | count; 0 = empty
  std::uint32_t capacity_ = 0;
  std::uint32_t entries_ = 0;
};

struct AdmissionStats {
  std::uint64_t refused = 0;  // pushes of keys that got no row for them
  std::uint64_t entries = 0;  // keys that the filters remember
  std::uint64_t bytes = 0;    // of the filters
  double error_rate = 0;      // estimate: how likely a new key is taken for another one
};

class TableAdmission {
 public:
  using Filter = CountingFilter<24>;

  // memory, used: where the filters' bytes are counted, of all tables and of the namespace; they outlive this.
  TableAdmission(const TableSchema& schema, std::uint32_t slot_count, std::atomic<std::uint64_t>& memory,
                 std::atomic<std::uint64_t>& used);
  TableAdmission(const TableAdmission&) = delete;
  TableAdmission& operator=(const TableAdmission&) = delete;
  ~TableAdmission();

  // One push of a key without a row: whether it gets one.
  [[nodiscard]] bool admit(const SlotOrder& slots, std::uint32_t stripe, std::uint64_t suffix,
                           std::uint64_t observation);
  // Numbers a batch that has no number of its own.
  [[nodiscard]] std::uint64_t next_observation() noexcept { return observations_++; }
  // Upper bound of the memory that `pushes` more take in a stripe.
  [[nodiscard]] std::uint64_t bytes_for(std::uint32_t stripe, std::uint64_t pushes) const noexcept;

  // What one slot remembers, versioned; empty when it remembers nothing.
  [[nodiscard]] std::vector<std::uint64_t> image(std::uint32_t stripe, std::uint32_t slot_in_stripe) const;
  [[nodiscard]] static std::vector<std::uint64_t> image_of(const Filter& filter);
  // The filters of a stripe as they are, by slot in stripe; none before its first push.
  [[nodiscard]] std::vector<Filter> copy(std::uint32_t stripe) const;
  // Puts it back in place of what is there. DataLoss when it is no image.
  Status load(std::uint32_t stripe, std::uint32_t slot_in_stripe, std::span<const std::uint64_t> image);

  [[nodiscard]] AdmissionStats stats() const noexcept;

 private:
  [[nodiscard]] Filter& filter(std::uint32_t stripe, std::uint32_t slot_in_stripe);
  void add_bytes(std::uint64_t before, std::uint64_t after) noexcept;

  const std::uint32_t after_;
  const std::uint64_t threshold_;  // of 53 random bits
  const std::uint64_t seed_;
  const std::uint32_t slots_per_stripe_;
  const std::uint32_t most_;  // entries of a slot
  std::atomic<std::uint64_t>& memory_;
  std::atomic<std::uint64_t>& used_;
  std::array<std::vector<Filter>, kStripes> filters_;  // by slot in stripe; empty until the stripe's first push
  std::atomic<std::uint64_t> bytes_{0}, refused_{0}, entries_{0}, used_slots_{0}, observations_{0};
};

}  // namespace sparserow

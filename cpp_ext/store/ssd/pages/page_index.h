// Where the records of one partition of a table lie: the slot and 32 bits of a key's hash to places. It holds no keys.
//
// The bits are those below the slot's, whatever the number of slots and of shards: so two keys share an entry's bits
// only where both are of one slot and of one hash in 2^32. While there are few rows, ranges of slots share parts, in
// which each entry has its slot; parts are halved as rows come, and at last each slot has one of its own.
//
// Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/ssd/pages/index_part.h"

namespace sparserow {

class PageIndex {
 public:
  // A partition has 2^slot_bits slots.
  explicit PageIndex(std::uint32_t slot_bits = 0);

  // Calls visit(place) for each entry of this key.
  template <class Visit>
  void candidates(IndexKey key, Visit&& visit) const {
    is_by_slot() ? of_slot_[key.slot].candidates(key, visit) : shared_[part(key.slot)].candidates(key, visit);
  }
  // Calls visit(hash, place) for each entry of a slot.
  template <class Visit>
  void in_slot(std::uint16_t slot, Visit&& visit) const {
    const auto take = [&](IndexKey key, Place place) {
      if (key.slot == slot) visit(key.hash, place);
    };
    is_by_slot() ? of_slot_[slot].each(slot, take) : shared_[part(slot)].each(slot, take);
  }
  // Calls visit(place) for every entry.
  template <class Visit>
  void each(Visit&& visit) const {
    const auto take = [&](IndexKey, Place place) { visit(place); };
    for (const auto& one : of_slot_) one.each(0, take);
    for (const auto& one : shared_) one.each(0, take);
  }

  // What a search of the key reads first, and, better after other work, what it reads next.
  [[gnu::always_inline]] void prefetch_part(IndexKey key) const noexcept {
    is_by_slot() ? __builtin_prefetch(&of_slot_[key.slot]) : __builtin_prefetch(&shared_[part(key.slot)]);
  }
  [[gnu::always_inline]] void prefetch(IndexKey key) const noexcept {
    is_by_slot() ? of_slot_[key.slot].prefetch(key.hash) : shared_[part(key.slot)].prefetch(key.hash);
  }
  void insert(IndexKey key, Place place);
  // False when the key has no such place.
  bool erase(IndexKey key, Place place);
  // The entry of this key and place, or none.
  [[nodiscard]] IndexEntry find(IndexKey key, Place place) noexcept {
    return is_by_slot() ? of_slot_[key.slot].find(key, place) : shared_[part(key.slot)].find(key, place);
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] const std::vector<IndexPart<SlotLine>>& by_slot() const noexcept { return of_slot_; }
  [[nodiscard]] const std::vector<IndexPart<SharedLine>>& shared() const noexcept { return shared_; }

 private:
  static constexpr std::size_t kMostEntries = 64;  // of a part, on average, before parts are halved

  [[nodiscard]] bool is_by_slot() const noexcept { return part_bits_ == slot_bits_; }
  [[nodiscard]] std::size_t part(std::uint16_t slot) const noexcept { return slot >> (slot_bits_ - part_bits_); }
  void halve();

  std::uint32_t slot_bits_;
  std::uint32_t part_bits_ = 0;
  std::vector<IndexPart<SharedLine>> shared_;  // by range of slots; none once each slot has a part
  std::vector<IndexPart<SlotLine>> of_slot_;
  std::size_t size_ = 0;
  std::size_t bytes_ = 0;
};

}  // namespace sparserow

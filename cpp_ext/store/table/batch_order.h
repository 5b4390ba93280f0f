// A batch of keys, hashed and grouped by stripe block by block, so that each stripe's lock is taken once
// per block and rows of one stripe follow each other.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <span>

#include "store/table/slot_order.h"

namespace sparserow {

class BatchOrder {
 public:
  static constexpr std::size_t kBlock = 8192;

  // keys: at most kBlock of them.
  void group(std::uint32_t table_id, const SlotOrder& slots, std::span<const std::uint64_t> keys) noexcept {
    begin_.fill(0);
    for (std::size_t i = 0; i < keys.size(); ++i) {
      hashes_[i] = row_hash(table_id, keys[i]);
      ++begin_[slots.stripe(hashes_[i]) + 1];
    }
    occupied_ = 0;
    for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
      occupied_ |= std::uint64_t{begin_[stripe + 1] != 0} << stripe;
      begin_[stripe + 1] += begin_[stripe];
    }
    std::array<std::uint16_t, kStripes> next;
    for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) next[stripe] = begin_[stripe];
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t hash = hashes_[i];
      const std::uint16_t at = next[slots.stripe(hash)]++;
      positions_[at] = static_cast<std::uint16_t>(i);
      suffixes_[at] = slots.suffix(hash);
    }
  }

  // The positions in the block, and the suffixes, of one stripe's keys in their order.
  [[nodiscard]] std::span<const std::uint16_t> positions(std::uint32_t stripe) const noexcept {
    return {positions_.data() + begin_[stripe], positions_.data() + begin_[stripe + 1]};
  }
  [[nodiscard]] std::span<const std::uint64_t> suffixes(std::uint32_t stripe) const noexcept {
    return {suffixes_.data() + begin_[stripe], suffixes_.data() + begin_[stripe + 1]};
  }
  // Calls act(stripe, its keys before it among those of the stripes) for each stripe in [first, last) that has keys.
  template <class Act>
  void for_occupied(std::uint32_t first, std::uint32_t last, Act&& act) const {
    static_assert(kStripes == 64);
    for (std::uint64_t left = occupied_ >> first << first; left != 0; left &= left - 1) {
      const auto stripe = static_cast<std::uint32_t>(std::countr_zero(left));
      if (stripe >= last) return;
      act(stripe, std::size_t{begin_[stripe]} - begin_[first]);
    }
  }
  // How many stripes a reader may have at once: the more, the longer one that is displaced holds writers up.
  static constexpr int kMostStripes = 8;

  // The end of the stripes from `first` on that have no more than `most` keys together, and of which no more than
  // kMostStripes have keys; at least one stripe.
  [[nodiscard]] std::uint32_t run_from(std::uint32_t first, std::size_t most) const noexcept {
    std::uint32_t last = first + 1;
    int stripes = begin_[last] != begin_[first];
    for (; last < kStripes && std::size_t{begin_[last + 1]} - begin_[first] <= most; ++last) {
      stripes += begin_[last + 1] != begin_[last];
      if (stripes > kMostStripes) break;
    }
    return last;
  }

 private:
  std::array<std::uint16_t, kStripes + 1> begin_;
  std::uint64_t occupied_ = 0;  // a bit for each stripe that has keys
  std::array<std::uint16_t, kBlock> positions_;
  std::array<std::uint64_t, kBlock> suffixes_;
  std::array<std::uint64_t, kBlock> hashes_;
};

}  // namespace sparserow

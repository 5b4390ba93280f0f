// Where a hash lies: its stripe, and its suffix within the stripe.
//
// A slot is the top bits of a hash; stripes deal slots out by their low bits. The suffix is what is left of the
// hash when the stripe's bits are taken out, left-aligned: so (stripe, suffix) is the hash again, and the order of
// suffixes visits a stripe slot by slot.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "util/hash.h"

namespace sparserow {

inline constexpr std::uint32_t kStripes = 64;

class SlotOrder {
 public:
  // slot_count: a power of two in [2, 65536]; below kStripes, the stripes beyond it stay empty.
  explicit constexpr SlotOrder(std::uint32_t slot_count) noexcept
      : slot_bits_(static_cast<std::uint32_t>(std::countr_zero(slot_count))),
        stripe_bits_(std::min<std::uint32_t>(slot_bits_, std::countr_zero(kStripes))) {}

  [[nodiscard]] constexpr std::uint32_t slot(std::uint64_t hash) const noexcept {
    return static_cast<std::uint32_t>(hash >> (64 - slot_bits_));
  }
  [[nodiscard]] constexpr std::uint32_t stripe(std::uint64_t hash) const noexcept { return slot(hash) % kStripes; }
  // Its low log2(stripes) bits are 0.
  [[nodiscard]] constexpr std::uint64_t suffix(std::uint64_t hash) const noexcept {
    const std::uint32_t high_bits = slot_bits_ - stripe_bits_;
    return (hash & high_mask()) | ((hash << slot_bits_) >> high_bits);
  }
  // The place of a suffix's slot among the slots of its stripe: slot / stripe_count().
  [[nodiscard]] constexpr std::uint32_t slot_in_stripe(std::uint64_t suffix) const noexcept {
    const std::uint32_t high_bits = slot_bits_ - stripe_bits_;
    return high_bits == 0 ? 0 : static_cast<std::uint32_t>(suffix >> (64 - high_bits));
  }
  // The first suffix of a slot of a stripe.
  [[nodiscard]] constexpr std::uint64_t first_suffix(std::uint32_t slot_in_stripe) const noexcept {
    const std::uint32_t high_bits = slot_bits_ - stripe_bits_;
    return high_bits == 0 ? 0 : static_cast<std::uint64_t>(slot_in_stripe) << (64 - high_bits);
  }
  [[nodiscard]] constexpr std::uint64_t hash(std::uint32_t stripe, std::uint64_t suffix) const noexcept {
    const std::uint32_t high_bits = slot_bits_ - stripe_bits_;
    const std::uint64_t low = (suffix << high_bits) >> slot_bits_;
    return (suffix & high_mask()) | static_cast<std::uint64_t>(stripe) << (64 - slot_bits_) | low;
  }

  // (stripe, suffix) as one number that grows along stripes and suffixes.
  [[nodiscard]] constexpr std::uint64_t position(std::uint32_t stripe, std::uint64_t suffix) const noexcept {
    return static_cast<std::uint64_t>(stripe) << (64 - stripe_bits_) | suffix >> stripe_bits_;
  }
  [[nodiscard]] constexpr std::uint32_t stripe_at(std::uint64_t position) const noexcept {
    return static_cast<std::uint32_t>(position >> (64 - stripe_bits_));
  }
  [[nodiscard]] constexpr std::uint64_t path_at(std::uint64_t position) const noexcept {
    return position << stripe_bits_;
  }
  // How many of a suffix's first bits are its slot_in_stripe().
  [[nodiscard]] constexpr std::uint32_t slot_bits_in_suffix() const noexcept { return slot_bits_ - stripe_bits_; }
  [[nodiscard]] constexpr std::uint32_t stripe_count() const noexcept { return 1u << stripe_bits_; }

 private:
  [[nodiscard]] constexpr std::uint64_t high_mask() const noexcept {
    const std::uint32_t high_bits = slot_bits_ - stripe_bits_;
    return high_bits == 0 ? 0 : ~std::uint64_t{0} << (64 - high_bits);
  }

  std::uint32_t slot_bits_;
  std::uint32_t stripe_bits_;
};

}  // namespace sparserow

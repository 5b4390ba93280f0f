// Two bytes beside each row of a tiered store: its heat, what the SSD has of it, and how many commits pin it.
//
// heat (4 bits) counts uses and is halved whenever eviction passes by, so that it holds both how often and how
// lately a row was used; a row that a scan brings in once has 1 and is among the first to go. pins counts
// prepared commits, which must not wait for a disk.
//
// Atomic, so that readers of a row, which share its stripe's lock, can touch and pin it. kChanged and kStored are set
// and cleared under the exclusive lock only.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace sparserow {

class RowMeta {
 public:
  static constexpr std::uint16_t kHeat = 0x000f;
  static constexpr std::uint16_t kChanged = 0x0010;  // differs from what the SSD has, or the SSD has nothing
  static constexpr std::uint16_t kStored = 0x0020;   // the SSD has an image, perhaps an older one
  static constexpr std::uint16_t kPin = 0x0040;      // one pin
  static constexpr std::uint16_t kMostPins = 0xffff / kPin;

  explicit RowMeta(std::uint16_t& bits) noexcept : bits_(bits) {}

  void reset(std::uint16_t bits) noexcept { bits_.store(bits, std::memory_order_relaxed); }
  [[nodiscard]] std::uint16_t load() const noexcept { return bits_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_changed() const noexcept { return (load() & kChanged) != 0; }
  [[nodiscard]] bool is_stored() const noexcept { return (load() & kStored) != 0; }
  [[nodiscard]] bool is_pinned() const noexcept { return load() >= kPin; }
  [[nodiscard]] std::uint16_t heat() const noexcept { return load() & kHeat; }

  // A lost race loses one count.
  void touch() noexcept {
    std::uint16_t bits = load();
    if ((bits & kHeat) != kHeat) {
      bits_.compare_exchange_strong(bits, static_cast<std::uint16_t>(bits + 1), std::memory_order_relaxed);
    }
  }
  void cool() noexcept {
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kHeat) | (bits & kHeat) >> 1); });
  }
  void set_changed() noexcept { bits_.fetch_or(kChanged, std::memory_order_relaxed); }
  void set_unstored() noexcept {  // the SSD has no image of it any more
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kStored) | kChanged); });
  }
  void set_stored() noexcept {  // as it is
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kChanged) | kStored); });
  }
  // False when it has its most pins.
  [[nodiscard]] bool pin() noexcept {
    std::uint16_t bits = load();
    do {
      if (bits / kPin == kMostPins) return false;
    } while (!bits_.compare_exchange_weak(bits, static_cast<std::uint16_t>(bits + kPin), std::memory_order_relaxed));
    return true;
  }
  // Nothing to do for a row that was deleted and created again since.
  void unpin() noexcept {
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>(bits < kPin ? bits : bits - kPin); });
  }

 private:
  template <class Change>
  void change(Change&& changed) noexcept {
    std::uint16_t bits = load();
    while (!bits_.compare_exchange_weak(bits, changed(bits), std::memory_order_relaxed)) {
    }
  }

  std::atomic_ref<std::uint16_t> bits_;
};

}  // namespace sparserow

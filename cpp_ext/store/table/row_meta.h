// Two bytes beside each row of a tiered store: its heat, what the SSD has of it, whether a hint named it, and how many
// commits pin it.
//
// heat (4 bits) counts uses and is halved whenever eviction passes by, so that it holds both how often and how
// lately a row was used; a row that a scan brings in once has 1 and is among the first to go. pins counts
// prepared commits, which must not wait for a disk. A row that a hint named is awaited: it is as hot as can be until
// its first use, so that it does not leave before that, and goes in the end if the hint was wrong.
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
  static constexpr std::uint16_t kAwaited = 0x0040;  // named by a hint, and not used since
  static constexpr std::uint16_t kPin = 0x0080;      // one pin
  static constexpr std::uint16_t kMostPins = 0xffff / kPin;

  explicit RowMeta(std::uint16_t& bits) noexcept : bits_(bits) {}

  void reset(std::uint16_t bits) noexcept { bits_.store(bits, std::memory_order_relaxed); }
  [[nodiscard]] std::uint16_t load() const noexcept { return bits_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_changed() const noexcept { return (load() & kChanged) != 0; }
  [[nodiscard]] bool is_stored() const noexcept { return (load() & kStored) != 0; }
  [[nodiscard]] bool is_pinned() const noexcept { return load() >= kPin; }
  [[nodiscard]] bool is_awaited() const noexcept { return (load() & kAwaited) != 0; }
  [[nodiscard]] std::uint16_t heat() const noexcept { return load() & kHeat; }

  // A lost race loses one count.
  void touch() noexcept {
    std::uint16_t bits = load();
    if ((bits & kAwaited) != 0) {  // its heat was no count of uses
      const auto used = static_cast<std::uint16_t>((bits & ~(kAwaited | kHeat)) | kHeatOfUsed);
      bits_.compare_exchange_strong(bits, used, std::memory_order_relaxed);
    } else if ((bits & kHeat) != kHeat) {
      bits_.compare_exchange_strong(bits, static_cast<std::uint16_t>(bits + 1), std::memory_order_relaxed);
    }
  }
  // Nothing to do for a row that is hotter than one of a single use: that outlasts the hint as it is.
  void await() noexcept {
    std::uint16_t bits = load();
    if ((bits & kAwaited) != 0 || (bits & kHeat) >= kHeatOfUsed) return;
    bits_.compare_exchange_strong(bits, static_cast<std::uint16_t>(bits | kAwaited | kHeat), std::memory_order_relaxed);
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
  static constexpr std::uint16_t kHeatOfUsed = 2;  // of a row that came to memory for a use, after that use

  template <class Change>
  void change(Change&& changed) noexcept {
    std::uint16_t bits = load();
    while (!bits_.compare_exchange_weak(bits, changed(bits), std::memory_order_relaxed)) {
    }
  }

  std::atomic_ref<std::uint16_t> bits_;
};

}  // namespace sparserow

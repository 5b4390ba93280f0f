// Two bytes beside each row of a tiered store: its heat, what the SSD has of it, whether a hint named it, and how many
// commits pin it.
//
// A row comes to memory on probation (eviction_policy.cc). Its heat (3 bits) is two things there: kUsed once it is used
// again after the use that it came for, and kWaits, how often the clock hand may still pass while the row waits for the
// push of that use. A pull may bring a row long before its push. That push is no use again, and until then the row's
// version is of an earlier push. A row that is not changed since it came waits. A row that is used again is kept: it
// has kMain, and its heat counts pulls and pushes, less two whenever the clock hand passes. A row that was fetched for
// a use is awaited: it is no use again, and one that a hint named is as hot as can be until then, and leaves in the end
// if the hint was wrong. pins counts prepared commits, which must not wait for a disk.
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
  static constexpr std::uint16_t kHeat = 0x0007;
  static constexpr std::uint16_t kWaits = 0x0003;  // on probation: passes of the clock hand before it is old
  static constexpr std::uint16_t kUsed = 0x0004;   // on probation: used again since it came, or back soon after it left
  static constexpr std::uint16_t kMain = 0x0008;   // kept: it was used again
  static constexpr std::uint16_t kChanged = 0x0010;  // differs from what the SSD has, or the SSD has nothing
  static constexpr std::uint16_t kStored = 0x0020;   // the SSD has an image, perhaps an older one
  static constexpr std::uint16_t kAwaited = 0x0040;  // fetched for a use that is still to come
  static constexpr std::uint16_t kPin = 0x0080;      // one pin
  static constexpr std::uint16_t kMostPins = 0xffff / kPin;

  explicit RowMeta(std::uint16_t& bits) noexcept : bits_(bits) {}

  void reset(std::uint16_t bits) noexcept { bits_.store(bits, std::memory_order_relaxed); }
  [[nodiscard]] std::uint16_t load() const noexcept { return bits_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool is_changed() const noexcept { return (load() & kChanged) != 0; }
  [[nodiscard]] bool is_stored() const noexcept { return (load() & kStored) != 0; }
  [[nodiscard]] bool is_pinned() const noexcept { return load() >= kPin; }
  [[nodiscard]] bool is_main() const noexcept { return (load() & kMain) != 0; }
  [[nodiscard]] bool is_awaited() const noexcept { return (load() & kAwaited) != 0; }
  [[nodiscard]] std::uint16_t heat() const noexcept { return load() & kHeat; }
  // To compare places of rows. A hint is no use.
  [[nodiscard]] std::uint16_t warmth() const noexcept {
    const std::uint16_t bits = load();
    if ((bits & kAwaited) != 0) return 1;
    if ((bits & kMain) != 0) return bits & kHeat;
    return (bits & kUsed) != 0 ? kStepHeat : 0;
  }
  // The next two are of a row on probation that is not awaited.
  [[nodiscard]] bool is_used_again() const noexcept { return (load() & kUsed) != 0; }
  // 0 when it waits for no push, or no longer.
  [[nodiscard]] int waits() const noexcept {
    const std::uint16_t bits = load();
    return (bits & kChanged) != 0 ? 0 : bits & kWaits;
  }

  // It came from the SSD. is_for_push: most likely for a push, and then is_back_soon counts as a use.
  void bring(bool is_for_push, bool is_back_soon) noexcept {
    reset(static_cast<std::uint16_t>(kStored | (is_for_push ? 3 : 1) | (is_for_push && is_back_soon ? kUsed : 0)));
  }
  // It was fetched for a pull, which comes next.
  void expect_pull() noexcept {
    change([](std::uint16_t bits) {
      return static_cast<std::uint16_t>((bits & (kMain | kAwaited | kUsed)) != 0 ? bits : bits | kAwaited);
    });
  }
  // A pull. A lost race loses one count.
  void touch() noexcept {
    std::uint16_t bits = load();
    std::uint16_t used = bits;
    if ((bits & kAwaited) != 0) {  // its heat was no count of uses
      used = static_cast<std::uint16_t>(bits & ~kAwaited);
      const bool is_kept = (bits & kMain) != 0;
      used = static_cast<std::uint16_t>(is_kept ? (used & ~kHeat) | kStepHeat : used & ~kUsed);
    } else if ((bits & kMain) == 0) {
      used |= kUsed;
    } else if ((bits & kHeat) != kHeat) {
      ++used;
    }
    if (used != bits) bits_.compare_exchange_strong(bits, used, std::memory_order_relaxed);
  }
  // A push, under the exclusive lock. Returns whether it is the first since the row came from the SSD: that belongs to
  // the use that the row came for.
  bool push() noexcept {
    const std::uint16_t bits = load();
    if ((bits & (kChanged | kAwaited)) == 0) {
      const int heat = (bits & kMain) != 0 ? std::min<int>(bits & kHeat, kStepHeat) : bits & kUsed;
      change([heat](std::uint16_t each) { return static_cast<std::uint16_t>((each & ~kHeat) | kChanged | heat); });
      return (bits & kStored) != 0;
    }
    bits_.fetch_or(kChanged, std::memory_order_relaxed);
    touch();
    return false;
  }
  // By a hint. Nothing to do for a row of several late uses: that outlasts the hint as it is.
  void await() noexcept {
    std::uint16_t bits = load();
    if ((bits & kMain) != 0 && (bits & kHeat) >= 2 * kStepHeat) return;
    const std::uint16_t kept = (bits & (kMain | kAwaited | kUsed)) == kUsed ? kMain : 0;
    bits_.compare_exchange_strong(bits, static_cast<std::uint16_t>(bits | kept | kAwaited | kHeat),
                                  std::memory_order_relaxed);
  }
  // The clock hand passes a row that is kept or awaited.
  void cool() noexcept {
    change([](std::uint16_t bits) {
      const int heat = bits & kHeat;
      return static_cast<std::uint16_t>((bits & ~kHeat) | (heat > kStepHeat ? heat - kStepHeat : 0));
    });
  }
  // The clock hand passes a row that waits.
  void wait_less() noexcept {
    change([](std::uint16_t bits) {
      return static_cast<std::uint16_t>((bits & kMain) == 0 && (bits & kWaits) != 0 ? bits - 1 : bits);
    });
  }
  // Ends probation; further uses count from here.
  void keep() noexcept {
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kHeat) | kMain); });
  }
  void set_unstored() noexcept {  // the SSD has no image of it any more
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kStored) | kChanged); });
  }
  void set_stored() noexcept {  // as it is
    change([](std::uint16_t bits) { return static_cast<std::uint16_t>((bits & ~kChanged) | kStored); });
  }
  // False when it has its most pins; more are counted elsewhere (extra_pins.h).
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
  static constexpr std::uint16_t kStepHeat = 2;  // of a step that pulls and pushes

  template <class Change>
  void change(Change&& changed) noexcept {
    std::uint16_t bits = load();
    while (!bits_.compare_exchange_weak(bits, changed(bits), std::memory_order_relaxed)) {
    }
  }

  std::atomic_ref<std::uint16_t> bits_;
};

}  // namespace sparserow

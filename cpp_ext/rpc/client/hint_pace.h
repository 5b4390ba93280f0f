// Which hints a client sends to one shard: all of them while the shard takes some, else one in so many.
//
// A shard takes none while its reads do not wait for a disk; then a hint is bytes and work for nothing.
// Not thread-safe.
#pragma once

#include <cstdint>

namespace sparserow::rpc {

class HintPace {
 public:
  static constexpr std::uint32_t kOneIn = 16;

  // Whether the next hint is to be sent.
  [[nodiscard]] bool take_turn() noexcept {
    if (skipped_left_ == 0) return true;
    --skipped_left_;
    return false;
  }
  void note_answer(std::uint64_t keys_taken) noexcept { skipped_left_ = keys_taken == 0 ? kOneIn - 1 : 0; }

 private:
  std::uint32_t skipped_left_ = 0;
};

}  // namespace sparserow::rpc

// A batch's keys grouped by stripe, once for all threads that apply a part of it (ApplyOptions::grouped). Each of them
// groups blocks until none is left, so that no thread groups all while others wait for it.
//
// Thread-safe.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "store/table/batch_order.h"

namespace sparserow {

class GroupedKeys {
 public:
  // keys: outlive it.
  GroupedKeys(std::uint32_t table_id, const SlotOrder& slots, std::span<const std::uint64_t> keys)
      : table_id_(table_id),
        slots_(slots),
        keys_(keys),
        count_((keys.size() + BatchOrder::kBlock - 1) / BatchOrder::kBlock),
        blocks_(std::make_unique_for_overwrite<BatchOrder[]>(count_)) {}

  // The order of the block that begins at keys[begin]; begin: a multiple of BatchOrder::kBlock. Waits for no thread but
  // those that are grouping a block now.
  [[nodiscard]] const BatchOrder& block_at(std::size_t begin) {
    group_all();
    return blocks_[begin / BatchOrder::kBlock];
  }

 private:
  void group_all() noexcept {
    if (done_.load(std::memory_order_acquire) == count_) return;
    for (std::size_t i = next_++; i < count_; i = next_++) {
      const auto block = keys_.subspan(i * BatchOrder::kBlock);
      blocks_[i].group(table_id_, slots_, block.first(std::min(BatchOrder::kBlock, block.size())));
      if (++done_ == count_) done_.notify_all();
    }
    for (std::size_t done = done_.load(); done != count_; done = done_.load()) done_.wait(done);
  }

  const std::uint32_t table_id_;
  const SlotOrder slots_;
  const std::span<const std::uint64_t> keys_;
  const std::size_t count_;
  const std::unique_ptr<BatchOrder[]> blocks_;
  std::atomic<std::size_t> next_{0};
  std::atomic<std::size_t> done_{0};
};

}  // namespace sparserow

#include "store/slot_range.h"

#include <algorithm>
#include <cstring>

#include "store/tiering.h"

namespace sparserow {
namespace {

constexpr std::size_t kFetchedAhead = 4;               // rows
constexpr std::uint64_t kBytesUnderLock = 256u << 10;  // so many are copied before the stripe is let go
constexpr std::uint64_t kBytesOfRange = 4u << 20;

bool is_wanted(std::uint64_t version, const SlotRange::Wanted& wanted) noexcept {
  return version >= wanted.first_version && version <= wanted.last_version;
}

}  // namespace

void SlotRange::sort() { std::ranges::sort(rows_, {}, &Row::suffix); }

bool SlotRange::replace(std::size_t sorted, std::uint64_t suffix, std::uint64_t version, std::uint32_t update_count,
                        const std::byte* data, std::size_t bytes) {
  const auto end = rows_.begin() + static_cast<std::ptrdiff_t>(sorted);
  const auto found = std::ranges::lower_bound(rows_.begin(), end, suffix, {}, &Row::suffix);
  if (found == end || found->suffix != suffix) return false;
  found->version = version;
  found->update_count = update_count;
  std::memcpy(data_.data() + found->at, data, bytes);
  return true;
}

// Reads at most most_rows rows from `from` on, under one lock. Returns where the next ones begin; 0: the slot has no
// more.
std::uint64_t SlotRange::read_memory(const Store::Impl& store, const Table& table, std::uint32_t slot,
                                     std::uint64_t from, const Wanted& wanted, std::uint64_t most_rows) {
  const SlotOrder& slots = store.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  const std::size_t fetched = std::min(table.layout.data_bytes, kMaxFetched);
  const std::shared_lock lock(store.stripes[stripe].mutex);
  may_be_on_ssd_ |= table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
  const TableStripe* stripe_rows = table.stripes[stripe].get();
  if (stripe_rows == nullptr) return 0;
  std::uint64_t looked_at = 0;
  for (std::uint64_t suffix = from;;) {
    entries_.clear();  // a segment has rows of other slots too
    suffix = stripe_rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) {
      if (at >= from && slots.slot_in_stripe(at) == in_stripe) entries_.push_back({at, id});
    });
    std::ranges::sort(entries_, {}, &RowIndex::Entry::suffix);
    for (std::size_t i = 0; i < entries_.size(); ++i, ++looked_at) {
      if (looked_at == most_rows) return entries_[i].suffix;
      if (wanted.with_data && i + kFetchedAhead < entries_.size()) {
        fetch_lines(stripe_rows->slab.data(entries_[i + kFetchedAhead].row), fetched);
        __builtin_prefetch(stripe_rows->slab.head(entries_[i + kFetchedAhead].row));
      }
      if (table.is_tiered) visited_.push_back(entries_[i].suffix);
      const RowRef row = stripe_rows->slab.at(entries_[i].row);
      if (!is_wanted(row.version(), wanted)) continue;
      add(entries_[i].suffix, row.version(), row.update_count(), row.weights(),
          wanted.with_data ? table.layout.data_bytes : 0);
    }
    if (suffix == 0 || slots.slot_in_stripe(suffix) != in_stripe) return 0;
  }
}

Status SlotRange::read(const Store::Impl& store, Table& table, std::uint32_t slot, std::uint64_t from,
                       const Wanted& wanted) {
  clear();
  visited_.clear();
  may_be_on_ssd_ = false;
  const std::uint64_t row_bytes = wanted.with_data ? table.layout.data_bytes : sizeof(Row);
  const std::uint64_t under_lock = std::max<std::uint64_t>(1, kBytesUnderLock / row_bytes);
  // Without an SSD a range is what one lock gives; with one, each range costs a look through the slot's index there.
  const std::uint64_t most_rows =
      std::clamp<std::uint64_t>(table.is_tiered ? kBytesOfRange / row_bytes : under_lock, 1, wanted.most_rows);
  std::uint64_t left = most_rows;
  end_ = from;
  do {
    const std::uint64_t slice = std::min(left, under_lock);
    end_ = read_memory(store, table, slot, end_, wanted, slice);
    left -= slice;
  } while (end_ != 0 && left > 0);
  if (!may_be_on_ssd_) return Status::ok();
  const std::size_t in_memory = visited_.size();
  SR_RETURN_IF_ERROR(store.tiering->visit_slot(table, slot, from, [&](std::uint64_t suffix, const RowImage& image) {
    if (end_ != 0 && suffix >= end_) return false;
    if (visited_.size() == in_memory + most_rows) {
      end_ = suffix;
      return false;
    }
    if (std::ranges::binary_search(std::span(visited_).first(in_memory), suffix)) return true;
    visited_.push_back(suffix);
    if (is_wanted(image.version, wanted)) {
      add(suffix, image.version, image.update_count, image.data, wanted.with_data ? table.layout.data_bytes : 0);
    }
    return true;
  }));
  sort();
  if (visited_.size() > most_rows) {  // some in memory, some not
    const auto beyond = visited_.begin() + static_cast<std::ptrdiff_t>(most_rows);
    std::ranges::nth_element(visited_, beyond);
    end_ = end_ == 0 ? *beyond : std::min(end_, *beyond);
  }
  if (end_ != 0) std::erase_if(rows_, [this](const Row& row) { return row.suffix >= end_; });
  return Status::ok();
}

}  // namespace sparserow

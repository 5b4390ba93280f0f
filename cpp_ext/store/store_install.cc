// Store's writes of whole rows: assign, and install of saved ones.
#include <algorithm>
#include <array>
#include <bit>
#include <mutex>
#include <utility>
#include <vector>

#include "store/store_writing.h"

namespace sparserow {
namespace {

// Keys of a batch in the order of stripes and of suffixes within them, as an index's segments follow each other: rows
// that are created then meet one segment after the other, and each grows once for all of its own.
class SlotSorted {
 public:
  SlotSorted(std::uint32_t table_id, const SlotOrder& slots, std::span<const std::uint64_t> keys) {
    if (keys.size() <= kLeast) return;
    std::vector<Place> places(keys.size()), other(keys.size());
    bool is_sorted = true;
    for (std::size_t i = 0; i < keys.size(); ++i) {
      const std::uint64_t hash = row_hash(table_id, keys[i]);
      const auto order = static_cast<std::uint32_t>(std::uint64_t{slots.stripe(hash)} << kSuffixBits |
                                                    slots.suffix(hash) >> (64 - kSuffixBits));
      is_sorted = is_sorted && (i == 0 || places[i - 1].order <= order);
      places[i] = {order, static_cast<std::uint32_t>(i)};
    }
    if (is_sorted) return;
    sort_by(places, other, 0);
    sort_by(other, places, kDigitBits);
    positions_.reserve(keys.size());
    keys_.reserve(keys.size());
    for (const Place& place : places) {
      positions_.push_back(place.position);
      keys_.push_back(keys[place.position]);
    }
  }

  // The keys in their new order, and where each was; both empty when the order of `keys` stays.
  [[nodiscard]] std::span<const std::uint64_t> keys() const noexcept { return keys_; }
  [[nodiscard]] std::span<const std::uint32_t> positions() const noexcept { return positions_; }

 private:
  static constexpr std::size_t kLeast = 16384;  // fewer gain nothing (measured)
  static constexpr std::uint32_t kDigitBits = 11;
  static constexpr std::uint32_t kSuffixBits = 2 * kDigitBits - std::bit_width(kStripes - 1);
  struct Place {
    std::uint32_t order;
    std::uint32_t position;
  };

  // Stable, so that the last of equal keys stays the last.
  static void sort_by(const std::vector<Place>& from, std::vector<Place>& to, std::uint32_t shift) {
    std::array<std::uint32_t, (1u << kDigitBits) + 1> begin{};
    const auto digit = [shift](const Place& place) { return place.order >> shift & ((1u << kDigitBits) - 1); };
    for (const Place& place : from) ++begin[digit(place) + 1];
    for (std::size_t i = 1; i < begin.size(); ++i) begin[i] += begin[i - 1];
    for (const Place& place : from) to[begin[digit(place)]++] = place;
  }

  std::vector<std::uint64_t> keys_;
  std::vector<std::uint32_t> positions_;
};

}  // namespace

// Finds or creates the rows of `keys` and calls fill(row, first + its index) for each, under its stripe's lock; fill
// sets the weights. With `filter` some are passed over.
Status Store::Impl::put_rows(Store& store, Table& table, std::span<const std::uint64_t> keys, std::size_t first,
                             const FillRow& fill, VersionFilter* filter) {
  Result<Reservation> reserved = store.reserve(table.schema.id, keys);
  if (!reserved.is_ok()) return reserved.status();
  if (filter != nullptr) filter->first = first;
  const WriteOptions write{.last_push = store.last_push_of(table, 0, -1), .admits_all = true, .filter = filter};
  const SlotSorted sorted(table.schema.id, slots, keys);
  const std::span<const std::uint32_t> positions = sorted.positions();
  if (!positions.empty()) keys = sorted.keys();
  if (filter != nullptr) filter->positions = positions;
  const auto index_of = [&](std::size_t at) { return first + (positions.empty() ? at : positions[at]); };
  BatchOrder order;
  Absences absences;
  Absences* const tiered = tiering != nullptr ? &absences : nullptr;
  pools.rows.expect(keys.size() * (table.layout.data_bytes + RowLayout::kHeadBytes));
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    wait_for_snapshot();
    order.group(table.schema.id, slots, block);
    if (filter != nullptr) filter->begin = begin;
    if (tiered != nullptr) {
      SR_RETURN_IF_ERROR(store.find_absent(table, order, block, 0, 1, reserved.value(), absences));
    }
    // Threads that put files of rows side by side begin at different stripes.
    const std::uint32_t begin_stripe = slots.stripe(row_hash(table.schema.id, block.front()));
    for (std::uint32_t step = 0; step < kStripes; ++step) {
      const std::uint32_t stripe = (begin_stripe + step) % kStripes;
      if (order.positions(stripe).empty()) continue;
      const std::unique_lock lock(stripes[stripe].mutex);
      const auto taken =
          store.write_stripe(table, stripe, order, block, write, tiered,
                             [&](RowRef row, std::uint16_t position) { fill(row, index_of(begin + position)); });
      if (!taken) return out_of_memory(table);
      reserved.value().consume(*taken);
    }
    pools.collapse_huge_pages();
    for (const std::uint16_t position : std::exchange(absences.deferred, {})) {
      VersionFilter alone;
      if (filter != nullptr) alone = {filter->versions, filter->replaces, index_of(begin + position)};
      SR_RETURN_IF_ERROR(put_rows(store, table, block.subspan(position, 1), index_of(begin + position), fill,
                                  filter == nullptr ? nullptr : &alone));
      if (filter != nullptr) filter->passed_over += alone.passed_over;
    }
  }
  return Status::ok();
}

Status Store::assign(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows) {
  return set_rows(table_id, keys, rows, nullptr);
}

Status Store::assign_versions(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows,
                              const std::uint64_t* versions) {
  return set_rows(table_id, keys, rows, versions);
}

Status Store::set_rows(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* rows,
                       const std::uint64_t* versions) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  const std::uint32_t dim = table->schema.dim;
  return impl_->put_rows(*this, *table, keys, 0, [&](RowRef row, std::size_t at) {
    convert_from_float(table->schema.dtype, rows + at * dim, row.weights(), dim);
    table->optimizer->follow_weights(row.weights(), row.state(table->layout));
    if (versions != nullptr) row.set_version(versions[at]);
  });
}

Status Store::install(std::uint32_t table_id, const StoredRows& rows) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  const RowPolicy& policy = table->schema.policy;
  const std::size_t count = rows.keys.size();
  const std::size_t weight_bytes = table->schema.dim * size_of(table->schema.dtype);
  const std::size_t state_floats = rows.state.empty() ? 0 : table->optimizer->state_floats();
  const bool begins_anew = rows.state.empty() && table->optimizer->state_floats() > 0;
  if (rows.versions.size() != count || rows.update_counts.size() != count ||
      rows.weights.size() != count * weight_bytes || rows.state.size() != count * state_floats ||
      (!rows.age_steps.empty() && rows.age_steps.size() != count) ||
      (!rows.push_seconds.empty() && rows.push_seconds.size() != count)) {
    return {Code::kInvalidArgument, "install: table " + table->schema.name + ": " + std::to_string(count) +
                                        " keys, and columns of other lengths than its schema asks for"};
  }
  return impl_->put_rows(*this, *table, rows.keys, 0, [&](RowRef row, std::size_t at) {
    std::memcpy(row.weights(), rows.weights.data() + at * weight_bytes, weight_bytes);
    if (state_floats > 0) {
      std::memcpy(row.state(table->layout), rows.state.data() + at * state_floats, state_floats * sizeof(float));
    } else {
      table->optimizer->init_state(row.weights(), row.state(table->layout));
    }
    row.set_version(rows.versions[at]);
    row.set_update_count(begins_anew ? 0 : rows.update_counts[at]);  // Adam corrects its state's bias by it
    std::uint32_t* stamp = row.stamps(table->layout);
    if (policy.stamps_steps()) {
      if (!rows.age_steps.empty()) *stamp = table->steps() - rows.age_steps[at];  // wraps, as ages do
      ++stamp;
    }
    if (policy.stamps_seconds() && !rows.push_seconds.empty()) *stamp = rows.push_seconds[at];
  });
}

void Store::set_sequence(std::uint32_t slot, std::uint64_t sequence) {
  Impl::Stripe& stripe = impl_->stripes[slot % impl_->slots.stripe_count()];
  const std::unique_lock lock(stripe.mutex);
  const std::uint32_t in_stripe = slot / impl_->slots.stripe_count();
  stripe.erasures[in_stripe] = 0;
  if (!stripe.log.is_open()) {
    stripe.sequences[in_stripe] = sequence;
    return;
  }
  // A follower may have seen the slot half restored, at a higher sequence: it gets the slot whole.
  const std::uint64_t next = std::max(stripe.sequences[in_stripe], sequence) + 1;
  stripe.sequences[in_stripe] = next;
  stripe.log.reset(in_stripe, next, impl_->versions.change_budget);
}

}  // namespace sparserow

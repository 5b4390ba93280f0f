// Store's writes of whole rows: assign, and install of saved ones.
#include <algorithm>
#include <mutex>
#include <utility>

#include "store/store_writing.h"

namespace sparserow {

// Finds or creates the rows of `keys` and calls fill(row, first + its index) for each, under its stripe's lock; fill
// sets the weights. With `filter` some are passed over.
Status Store::Impl::put_rows(Store& store, Table& table, std::span<const std::uint64_t> keys, std::size_t first,
                             const FillRow& fill, VersionFilter* filter) {
  Result<Reservation> reserved = store.reserve(table.schema.id, keys);
  if (!reserved.is_ok()) return reserved.status();
  const WriteOptions write{.last_push = store.last_push_of(table, 0, -1), .admits_all = true, .filter = filter};
  BatchOrder order;
  Absences absences;
  Absences* const tiered = tiering != nullptr ? &absences : nullptr;
  pools.rows.expect(keys.size() * (table.layout.data_bytes + RowLayout::kHeadBytes));
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    wait_for_snapshot();
    order.group(table.schema.id, slots, block);
    if (filter != nullptr) filter->first = first + begin;
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
                             [&](RowRef row, std::uint16_t position) { fill(row, first + begin + position); });
      if (!taken) return out_of_memory(table);
      reserved.value().consume(*taken);
    }
    pools.collapse_huge_pages();
    for (const std::uint16_t position : std::exchange(absences.deferred, {})) {
      SR_RETURN_IF_ERROR(put_rows(store, table, block.subspan(position, 1), first + begin + position, fill, filter));
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

// Store's writes by a batch of gradients, and erasures.
#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <utility>

#include "store/grouped_keys.h"
#include "store/store_writing.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

// Collects row updates and hands them to the optimizer a few at a time, while their rows are in cache. Gradients lie
// in the order of keys, not of stripes: each is fetched as it comes in (4 M rows x 64, Adagrad: 330 -> 290 ns a row).
class UpdateGroup {
 public:
  UpdateGroup(const Optimizer& optimizer, const ApplyOptions& options, std::uint32_t dim) noexcept
      : optimizer_(optimizer), options_(options), fetched_(std::min(dim * sizeof(float), kMaxFetched)) {}

  void add(const RowUpdate& update) noexcept {
    fetch_lines(reinterpret_cast<const std::byte*>(update.grad), fetched_);
    updates_[count_++] = update;
    if (count_ == updates_.size()) flush();
  }
  void flush() noexcept {
    optimizer_.apply({updates_.data(), count_}, options_.lr, options_.grad_scale);
    count_ = 0;
  }

 private:
  const Optimizer& optimizer_;
  const ApplyOptions& options_;
  const std::size_t fetched_;  // bytes of each gradient
  std::array<RowUpdate, 8> updates_;
  std::size_t count_ = 0;
};

// The stripes of a part that have keys.
std::vector<std::uint32_t> stripes_of(const BatchOrder& order, const ApplyOptions& options) {
  std::vector<std::uint32_t> out;
  for (std::uint32_t stripe = options.part; stripe < kStripes; stripe += options.parts) {
    if (!order.positions(stripe).empty()) out.push_back(stripe);
  }
  return out;
}

}  // namespace

// Returns the stamp of a row that changes now.
LastPush Store::last_push_of(Table& table, std::uint64_t job, std::int64_t step) const {
  LastPush last_push;
  const RowPolicy& policy = table.schema.policy;
  if (policy.stamps_steps()) last_push.values[last_push.count++] = table.tick(job, step);
  if (policy.stamps_seconds()) last_push.values[last_push.count++] = static_cast<std::uint32_t>(impl_->unix_seconds());
  return last_push;
}

// Looks up which of a block's rows are on the SSD and not in memory, and fetches those. A row that the reservation
// found nowhere is still nowhere while its token has not moved.
Status Store::find_absent(Table& table, const BatchOrder& order, std::span<const std::uint64_t> block,
                          std::uint32_t part, std::uint32_t parts, const Reservation& reservation, Absences& absences) {
  absences.tokens.assign(block.size(), Absences::kUnknown);
  std::vector<Tiering::Miss> misses;
  for (std::uint32_t stripe = part; stripe < kStripes; stripe += parts) {
    if (order.positions(stripe).empty()) continue;
    const std::shared_lock lock(impl_->stripes[stripe].mutex);
    const bool may_be_on_ssd = table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
    walk_stripe<Fetch::kNothing>(
        table, order, stripe, [&](std::uint16_t position, std::uint64_t suffix, std::uint32_t id) {
          if (id != RowIndex::kNone) return;
          const Tiering::Miss miss{.key = block[position],
                                   .suffix = suffix,
                                   .position = position,
                                   .stripe = static_cast<std::uint16_t>(stripe)};
          const std::uint32_t token = impl_->tiering->token(stripe, suffix);
          const auto seen = reservation.absences_.find(row_hash(table.schema.id, block[position]));
          if (may_be_on_ssd && (seen == reservation.absences_.end() || seen->second != token)) {
            misses.push_back(miss);
          } else {
            absences.tokens[position] = token;
          }
        });
  }
  return impl_->tiering->resolve(table, std::move(misses), /*must_install=*/true,
                                 [&](const Tiering::Miss& miss, std::uint32_t id, const RowImage* image) {
                                   if (id == RowIndex::kNone && image == nullptr) {
                                     absences.tokens[miss.position] = impl_->tiering->token(miss.stripe, miss.suffix);
                                   }
                                 });
}

// Brings the rows of at most kMostProbed keys into cache together, before each stripe is written alone: a stripe has a
// few of them, whose fetches would hide nothing of each other. (For 500 keys it costs as much as it saves.)
void Store::Impl::fetch_rows(const Table& table, const BatchOrder& order) const {
  for (std::uint32_t stripe = 0, end = 0; stripe < kStripes; stripe = end) {
    end = order.run_from(stripe, kMostProbed);
    const ReadLocks locks(*this, order, stripe, end);
    walk_stripes<Fetch::kRow>(table, order, stripe, end, [](auto...) {});
  }
}

std::shared_ptr<GroupedKeys> Store::grouped(std::uint32_t table_id, std::span<const std::uint64_t> keys) const {
  return std::make_shared<GroupedKeys>(table_id, impl_->slots, keys);
}

Status Store::apply(std::uint32_t table_id, std::span<const std::uint64_t> keys, const float* grads,
                    const ApplyOptions& options) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (options.dim != 0 && options.dim != table->schema.dim) {
    return {Code::kNotFound, "apply: table " + table->schema.name + " was made anew with dim " +
                                 std::to_string(table->schema.dim) + "; the gradients have dim " +
                                 std::to_string(options.dim)};
  }
  if (!is_valid(table->schema.dtype)) {
    return {Code::kInvalidArgument, "apply: table " + table->schema.name +
                                        " has dtype int8: its rows are read, never "
                                        "trained"};
  }
  if (options.parts == 0 || options.part >= options.parts) {
    return not_allowed("apply.part", options.part, below_text(options.parts));
  }
  if (options.reservation == nullptr && impl_->options.memory_budget_bytes > 0) {
    Result<Reservation> reserved = reserve(table_id, keys);
    if (!reserved.is_ok()) return reserved.status();
    ApplyOptions with_reservation = options;
    with_reservation.reservation = &reserved.value();
    return apply(table_id, keys, grads, with_reservation);
  }
  const std::uint32_t dim = table->schema.dim;
  std::vector<float> scratch(dim);
  const WriteOptions write{.last_push = last_push_of(*table, options.job, options.step),
                           .scratch = scratch.data(),
                           .observation = options.observation || table->admission == nullptr
                                              ? options.observation.value_or(0)
                                              : table->admission->next_observation()};
  BatchOrder own_order;
  Absences absences;
  Absences* const tiered = impl_->tiering != nullptr ? &absences : nullptr;
  ArenaPool& rows = impl_->pools.rows;
  if (rows.opened_arenas() == 0) rows.expect(keys.size() * (table->layout.data_bytes + RowLayout::kHeadBytes));
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    impl_->wait_for_snapshot();
    if (options.grouped == nullptr) own_order.group(table_id, impl_->slots, block);
    const BatchOrder& order = options.grouped == nullptr ? own_order : options.grouped->block_at(begin);
    if (block.size() <= kMostProbed && options.parts == 1) impl_->fetch_rows(*table, order);
    if (tiered != nullptr && options.reservation->has_absent_) {
      SR_RETURN_IF_ERROR(
          find_absent(*table, order, block, options.part, options.parts, *options.reservation, absences));
    }
    SR_RETURN_IF_ERROR(impl_->write_each(stripes_of(order, options), [&](std::uint32_t stripe) -> Status {
      if (options.has_changed != nullptr) *options.has_changed = true;
      UpdateGroup group(*table->optimizer, options, dim);
      const auto taken =
          write_stripe(*table, stripe, order, block, write, tiered, [&](RowRef row, std::uint16_t position) {
            const std::uint32_t count = row.update_count();
            row.set_update_count(count < std::numeric_limits<std::uint32_t>::max() ? count + 1 : count);
            group.add({row.weights(), row.state(table->layout), grads + (begin + position) * dim, block[position],
                       row.update_count()});
          });
      group.flush();
      if (!taken) return out_of_memory(*table);
      if (options.reservation != nullptr) options.reservation->consume(*taken);
      return Status::ok();
    }));
    impl_->pools.collapse_huge_pages();
    for (const std::uint16_t position : std::exchange(absences.deferred, {})) {
      ApplyOptions alone = options;
      alone.part = 0;
      alone.parts = 1;
      alone.grouped = nullptr;
      Reservation nothing(this);  // what it takes was promised to the batch
      alone.reservation = &nothing;
      alone.observation = write.observation;
      SR_RETURN_IF_ERROR(apply(table_id, block.subspan(position, 1), grads + (begin + position) * dim, alone));
    }
  }
  return Status::ok();
}

Result<std::uint64_t> Store::erase(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                   std::span<const std::uint64_t> if_versions) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  impl_->wait_for_snapshot();
  if (impl_->tiering != nullptr) return impl_->tiering->erase(*table, keys, if_versions);
  std::uint64_t erased = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const std::uint64_t hash = row_hash(table_id, keys[i]);
    const std::uint32_t stripe = impl_->slots.stripe(hash);
    const std::uint64_t suffix = impl_->slots.suffix(hash);
    const std::unique_lock lock(impl_->stripes[stripe].mutex);
    if (!if_versions.empty()) {
      const std::uint32_t id = table->find(stripe, suffix);
      if (id == RowIndex::kNone || table->row(stripe, id).version() != if_versions[i]) continue;
    }
    impl_->save_before_erasure(*table, stripe, suffix);
    if (!table->remove(stripe, suffix)) continue;
    impl_->erased(impl_->stripes[stripe], suffix, table_id, keys[i]);
    ++erased;
  }
  return erased;
}

void Store::Impl::save_before_erasure(const Table& table, std::uint32_t stripe, std::uint64_t suffix) {
  Snapshot* const snapshot = stripes[stripe].snapshot;
  Snapshot::Side* const side = snapshot == nullptr ? nullptr : snapshot->side(table, stripe);
  const std::uint32_t id = side == nullptr ? RowIndex::kNone : table.find(stripe, suffix);
  if (id == RowIndex::kNone) return;
  const RowRef row = table.row(stripe, id);
  snapshot->save(*side, table, stripe, suffix, row.version(), row.update_count(), row.weights());
}

}  // namespace sparserow

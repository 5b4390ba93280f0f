// What a store with an SSD does differently: reserve, fetch_to_memory and scan.
#include <algorithm>
#include <numeric>

#include "store/slot_range.h"
#include "store/store_impl.h"
#include "store/tiering.h"

namespace sparserow {
namespace {

// Keys of a block that are not in memory; visit_row(stripe, suffix, id) for the others, under the stripe's shared lock.
template <class Stripes, class Misses, class VisitRow, class VisitAbsent>
void split(const Table& table, Stripes& stripes, const BatchOrder& order, std::span<const std::uint64_t> block,
           Misses& misses, VisitRow&& visit_row, VisitAbsent&& visit_absent) {
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    if (order.positions(stripe).empty()) continue;
    const std::shared_lock lock(stripes[stripe].mutex);
    const bool may_be_on_ssd = table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
    walk_stripe<Fetch::kMeta>(table, order, stripe,
                              [&](std::uint16_t position, std::uint64_t suffix, std::uint32_t id) {
                                if (id != RowIndex::kNone) {
                                  visit_row(stripe, suffix, id);
                                } else if (may_be_on_ssd) {
                                  misses.push_back({.key = block[position],
                                                    .suffix = suffix,
                                                    .position = position,
                                                    .stripe = static_cast<std::uint16_t>(stripe)});
                                } else {
                                  visit_absent(stripe);
                                }
                              });
  }
}

// Calls use(misses) for the keys of each block that are not in memory and may be on the SSD, until it gives an error or
// nullopt; visit_row(stripe, suffix, id) for the others, as split() does.
template <class Miss, class Stripes, class VisitRow, class Use>
Status each_missing(const Table& table, const SlotOrder& slots, Stripes& stripes, std::span<const std::uint64_t> keys,
                    VisitRow&& visit_row, Use&& use) {
  BatchOrder order;
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    order.group(table.schema.id, slots, block);
    std::vector<Miss> misses;
    split(table, stripes, order, block, misses, visit_row, [](std::uint32_t) {});
    if (misses.empty()) continue;
    const std::optional<Status> used = use(std::move(misses));
    if (!used || !used->is_ok()) return used.value_or(Status::ok());
  }
  return Status::ok();
}

}  // namespace

// Rows that exist are brought to memory and pinned there; for the others memory is promised. Since those of one block
// may push out what the next one needs, room is made for the absent at the end.
Result<Store::Reservation> Store::reserve_tiered(const std::shared_ptr<Table>& table,
                                                 std::span<const std::uint64_t> keys) {
  Reservation reservation(this, 0, table->memory);
  reservation.table_ = table;
  reservation.pins_.reserve(keys.size());
  Tiering::Counts absent{};
  Status status = table->failure();
  BatchOrder order;
  const auto pin = [&](std::uint32_t stripe, std::uint64_t suffix, std::uint32_t id) {
    if (!table->stripes[stripe]->slab.meta(id).pin()) table->extra_pins.add(impl_->slots.hash(stripe, suffix));
    reservation.pins_.push_back({suffix, stripe});  // which has room
  };
  bool has_absent = false;
  for (std::size_t begin = 0; begin < keys.size() && status.is_ok(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    order.group(table->schema.id, impl_->slots, block);
    std::vector<Tiering::Miss> misses;
    split(*table, impl_->stripes, order, block, misses, pin, [&](std::uint32_t stripe) {
      ++absent[stripe];
      has_absent = true;
    });
    impl_->count(block.size(), misses.size());
    Status looked_up =
        impl_->tiering->resolve(*table, std::move(misses), /*must_install=*/false,
                                [&](const Tiering::Miss& miss, std::uint32_t id, const RowImage* image) {
                                  if (id != RowIndex::kNone) {
                                    pin(miss.stripe, miss.suffix, id);
                                    return;
                                  }
                                  ++absent[miss.stripe];  // of those that found no room: asked for below
                                  has_absent = true;
                                  if (image != nullptr) return;
                                  reservation.absences_.emplace(row_hash(table->schema.id, miss.key),
                                                                impl_->tiering->token(miss.stripe, miss.suffix));
                                });
    if (!looked_up.is_ok()) status = std::move(looked_up);
  }
  if (!status.is_ok()) return status;
  reservation.has_absent_ = has_absent;
  if (!has_absent) return reservation;
  const Result<std::uint64_t> promised = impl_->tiering->promise_room(*table, absent);
  if (!promised.is_ok()) return promised.status();
  reservation.bytes_ = promised.value();
  impl_->tiering->request_background_evict(*table, std::accumulate(absent.begin(), absent.end(), std::uint64_t{0}));
  return reservation;
}

void Store::unpin(const Table& table, const std::vector<Reservation::Pin>& pins) noexcept {
  for (std::size_t begin = 0; begin < pins.size();) {
    const std::uint32_t stripe = pins[begin].stripe;
    std::array<std::uint64_t, kMostProbed> suffixes;
    std::array<std::uint32_t, kMostProbed> ids;
    const std::size_t count = suffixes_of_stripe(std::span(pins).subspan(begin), std::span(suffixes));
    begin += count;
    const std::shared_lock lock(impl_->stripes[stripe].mutex);
    table.find_all(stripe, std::span(suffixes).first(count), ids.data());
    const auto rows = std::span(ids).first(count);
    for (const std::uint32_t id : rows) {
      if (id != RowIndex::kNone) table.stripes[stripe]->slab.fetch_meta(id);
    }
    for (std::size_t i = 0; i < count; ++i) {
      if (table.extra_pins.take(impl_->slots.hash(stripe, suffixes[i]))) continue;
      if (ids[i] != RowIndex::kNone) table.stripes[stripe]->slab.meta(ids[i]).unpin();
    }
  }
}

Status Store::fetch_to_memory(std::uint32_t table_id, std::span<const std::uint64_t> keys, FetchCause cause) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (impl_->tiering == nullptr) return Status::ok();
  SR_RETURN_IF_ERROR(table->failure());
  const bool is_hint = cause == FetchCause::kPrefetch;
  const auto await = [&](std::uint32_t stripe, std::uint64_t, std::uint32_t id) {
    if (is_hint) table->stripes[stripe]->slab.meta(id).await();
  };
  // The pull itself counts keys that have no row.
  std::atomic<std::uint64_t>& counted = is_hint ? impl_->tier_ahead : impl_->tier_misses;
  const auto visit = [&](const Tiering::Miss& miss, std::uint32_t id, const RowImage*) {
    if (id == RowIndex::kNone) return;
    await(miss.stripe, miss.suffix, id);
    if (!is_hint) table->stripes[miss.stripe]->slab.meta(id).expect_pull();
    counted.fetch_add(1, std::memory_order_relaxed);
  };
  return each_missing<Tiering::Miss>(*table, impl_->slots, impl_->stripes, keys, await,
                                     [&](std::vector<Tiering::Miss> misses) -> std::optional<Status> {
                                       return impl_->tiering->resolve(*table, std::move(misses),
                                                                      /*must_install=*/false, visit);
                                     });
}

bool Store::would_block(std::uint32_t table_id, std::span<const std::uint64_t> keys) const {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr || impl_->tiering == nullptr) return false;
  bool any = !table->failure().is_ok();
  if (any) return true;
  const auto ignore = [](std::uint32_t, std::uint64_t, std::uint32_t) {};
  static_cast<void>(each_missing<Tiering::Miss>(*table, impl_->slots, impl_->stripes, keys, ignore,
                                                [&](const std::vector<Tiering::Miss>&) -> std::optional<Status> {
                                                  any = true;
                                                  return std::nullopt;
                                                })
                        .is_ok());
  return any;
}

bool Store::waits_for_disk() const noexcept {
  constexpr double kLeastShare = 1.0 / 16;  // docs/measurements/tiers.md has what a hint costs
  return impl_->tiering != nullptr && impl_->tiering->waited_share() >= kLeastShare;
}

Status Store::write_back() {
  if (impl_->tiering == nullptr) return {Code::kFailedPrecondition, "write_back: this store has no SSD"};
  return impl_->tiering->write_back();
}

std::optional<TierStats> Store::tier_stats() const {
  if (impl_->tiering == nullptr) return std::nullopt;
  const std::uint64_t misses = impl_->tier_misses;  // before the keys, so that there are never fewer
  const std::uint64_t keys = impl_->tier_keys;
  return TierStats{.hits = keys - std::min(keys, misses),
                   .misses = misses,
                   .prefetched = impl_->tier_ahead,
                   .rows_evicted = impl_->tiering->rows_evicted(),
                   .background_evicted = impl_->tiering->background_evicted(),
                   .is_making_room = impl_->tiering->is_making_room(),
                   .resident_bytes = impl_->pools.resident_bytes(),
                   .longest_lock = impl_->tiering->longest_lock(),
                   .ssd = impl_->tiering->ssd_stats()};
}

Result<ScanPage> Store::scan_tiered(Table& table, std::uint64_t cursor, std::uint32_t max_rows, bool with_state) const {
  const SlotOrder& slots = impl_->slots;
  const std::uint32_t slots_per_stripe = impl_->options.slot_count / slots.stripe_count();
  ScanPage page;
  SlotRange range;
  std::uint64_t from = slots.path_at(cursor);
  for (std::uint32_t stripe = slots.stripe_at(cursor); stripe < slots.stripe_count(); ++stripe, from = 0) {
    if (!impl_->has_rows(table, stripe)) continue;
    for (std::uint32_t in_stripe = slots.slot_in_stripe(from); in_stripe < slots_per_stripe;) {
      from = std::max(from, slots.first_suffix(in_stripe));
      if (page.keys.size() == max_rows) {
        page.next_cursor = slots.position(stripe, from);
        return page;
      }
      const std::uint32_t slot = in_stripe * slots.stripe_count() + stripe;
      SR_RETURN_IF_ERROR(range.read(*impl_, table, slot, from, {.most_rows = max_rows - page.keys.size()}));
      for (const SlotRange::Row& row : range.rows()) {
        append_row(page, table, key_of_hash(table.schema.id, slots.hash(stripe, row.suffix)), row.version,
                   row.update_count, range.data(row), with_state);
      }
      from = range.end();
      if (from == 0) ++in_stripe;
    }
  }
  return page;
}

}  // namespace sparserow

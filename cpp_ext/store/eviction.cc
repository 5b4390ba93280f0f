// The way down: cold rows leave memory for the SSD. See tiering.h; which ones is in eviction_policy.cc.
#include <algorithm>
#include <new>
#include <numeric>

#include "store/ssd/ssd_readers.h"
#include "store/tiering.h"

namespace sparserow {
namespace {

constexpr int kRounds = 32;                  // of eviction for one request
constexpr std::uint64_t kBatch = 4096;       // rows written at once
constexpr std::uint64_t kSpareShare = 32;    // of a stripe's rows there is room for one more, when nothing comes
constexpr std::uint64_t kUsed = 4;           // of that room a part has been taken before more is made
constexpr std::uint64_t kAskedFor = 128;     // rows that come: to look whether there is room is dearer than one
constexpr std::uint64_t kBatchAhead = 1024;  // rows, after which a request need not wait any longer

std::uint64_t sum_of(const std::array<std::uint64_t, kStripes>& rows) noexcept {
  return std::accumulate(rows.begin(), rows.end(), std::uint64_t{0});
}

}  // namespace

// Bytes over budget when `rows` more rows come; 0 when they fit.
std::uint64_t Store::Tiering::excess(const Table& table, const Counts& rows) const {
  const std::uint64_t more = store_.bytes_for(table, rows);
  const std::uint64_t need = more + store_.budget.taken();
  const std::uint64_t budget = store_.options.memory_budget_bytes;
  return std::max(need <= budget ? 0 : need - budget, excess_of_share(table, more));
}

// Bytes over the table's own part of the budget when it takes `more`.
std::uint64_t Store::Tiering::excess_of_share(const Table& table, std::uint64_t more) const {
  const float share = table.schema.policy.ram_share;
  if (share == 0) return 0;
  const auto part = static_cast<std::uint64_t>(share * static_cast<double>(store_.options.memory_budget_bytes));
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    if (table.stripes[stripe] != nullptr) more += table.stripes[stripe]->bytes();
  }
  return more <= part ? 0 : more - part;
}

Status Store::Tiering::make_room(Table& table, const Counts& rows) {
  return make_room_and(table, rows, /*waits=*/false, [&] { return excess(table, rows) == 0; });
}

// The promise is made under the lock of evictions: between room and promise another thread may take the room.
Result<std::uint64_t> Store::Tiering::promise_room(Table& table, const Counts& rows) {
  std::uint64_t bytes = 0;
  SR_RETURN_IF_ERROR(make_room_and(table, rows, /*waits=*/true, [&] {
    if (excess(table, rows) > 0) return false;
    bytes = store_.bytes_for(table, rows);
    return store_.promise(table, bytes).is_ok();
  }));
  return bytes;
}

// Evicts until take() is true.
Status Store::Tiering::make_room_and(Table& table, const Counts& rows, bool waits, const std::function<bool()>& take) {
  if (take()) return Status::ok();
  const std::uint64_t least = sum_of(rows) * table.layout.data_bytes;
  if (least > store_.options.memory_budget_bytes) {  // no row leaves for one that never fits
    return store_.budget.exceeded_by(table.schema.name, least);
  }
  const auto is_in_vain = [&] { return !waits && ssd_->is_full(); };
  if (evicting_.try_lock()) {
    const MutexLock lock(evicting_, std::adopt_lock);
    if (is_in_vain()) return store_.budget.exceeded_by(table.schema.name, least);
    return evict_until(table, rows, take);
  }
  if (is_in_vain()) return store_.budget.exceeded_by(table.schema.name, least);
  ++wanting_;
  const MutexLock lock(evicting_);
  --wanting_;
  return evict_until(table, rows, take);
}

Status Store::Tiering::evict_until(Table& table, const Counts& rows, const std::function<bool()>& take) {
  for (int round = 0; round < kRounds; ++round) {
    if (take()) return Status::ok();
    std::uint64_t progress = 0;
    SR_RETURN_IF_ERROR(evict_for(table, rows, progress));
    if (progress == 0 && excess(table, rows) > 0) break;
  }
  if (take()) return Status::ok();
  return store_.budget.exceeded_by(table.schema.name, store_.bytes_for(table, rows));
}

Status Store::Tiering::evict_for(Table& table, const Counts& rows, std::uint64_t& progress) {
  if (!is_colder_elsewhere(table, rows)) {
    const Status status = evict_own(table, missing_places(table, rows), progress);
    if (!status.is_ok()) return progress > 0 ? Status::ok() : status;
  }
  const std::uint64_t over = excess(table, rows);
  return over == 0 ? Status::ok() : shrink(over, table, rows, progress);
}

// Whether another table's rows are to leave for so many of this one.
bool Store::Tiering::is_colder_elsewhere(const Table& table, const Counts& rows) {
  if (excess_of_share(table, store_.bytes_for(table, rows)) > 0) return false;
  const Place cold = coldest_place(table);
  std::uint32_t own = 0;
  while (own + 1 < kStripes && rows[own] == 0) ++own;
  return cold.table != nullptr && cold.table.get() != &table && 2 * cold.heat + 0.5 < heat_of(table, own);
}

// How many free places each stripe lacks for so many more rows.
Store::Tiering::Counts Store::Tiering::missing_places(const Table& table, const Counts& rows) const {
  Counts missing{};
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    if (rows[stripe] == 0) continue;
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    const TableStripe* stripe_rows = table.stripes[stripe].get();
    if (stripe_rows != nullptr)
      missing[stripe] = rows[stripe] - std::min(rows[stripe], stripe_rows->slab.free_places());
  }
  return missing;
}

// Where many tables would close pages of few rows on the SSD, rows of further stripes leave with those that are to. Of
// those where `collected` is above 0 they have been taken.
void Store::Tiering::collect_more(Table& table, const Counts& collected, Eviction& out) {
  constexpr std::uint64_t kMostShare = 4;  // one row of so many in memory leaves for this, or half a page
  const std::uint64_t together = ssd_->rows_together(table.codec.bytes());
  if (together == 0 || out.batch.writes().size() >= together) return;
  std::uint64_t resident = 0;
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    if (table.stripes[stripe] != nullptr) resident += table.stripes[stripe]->slab.rows();
  }
  const std::uint64_t most = std::max(resident / kMostShare, together / 4);
  const std::uint64_t first = next_random() % kStripes;
  for (std::uint32_t i = 0; i < kStripes; ++i) {
    const std::uint64_t written = out.batch.writes().size();
    const std::uint64_t left = most - std::min(most, out.victims.size());
    if (written >= together || left == 0) return;
    const auto stripe = static_cast<std::uint32_t>((first + i) % kStripes);
    if (collected[stripe] == 0) collect(table, stripe, std::min(together - written, left), out);
  }
}

// Evicts so many rows of each stripe of the table, or a few more.
Status Store::Tiering::evict_own(Table& table, const Counts& missing, std::uint64_t& progress) {
  Eviction eviction;
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    if (missing[stripe] == 0) continue;
    collect(table, stripe, missing[stripe], eviction);
    if (eviction.victims.size() >= kBatch) SR_RETURN_IF_ERROR(carry_out(table, eviction, progress));
  }
  if (!eviction.victims.empty()) collect_more(table, missing, eviction);
  return carry_out(table, eviction, progress);
}

void Store::Tiering::request_background_evict(Table& table, std::uint64_t rows) {
  if (table.rows_since_wakeup.fetch_add(rows, std::memory_order_relaxed) + rows < kAskedFor) return;
  table.rows_since_wakeup = 0;
  {
    const MutexLock lock(background_mutex_);
    if (!background_tables_.insert(table.schema.id).second) return;
  }
  ahead_asked_.notify_one();
}

void Store::Tiering::run_background_evict() {
  take_ssd_priority();
  MutexLock lock(background_mutex_);
  for (;;) {
    ahead_asked_.wait(background_mutex_,
                      [this]() SR_REQUIRES(background_mutex_) { return is_ending_ || !background_tables_.empty(); });
    if (is_ending_) return;
    const std::uint32_t table_id = background_tables_.extract(background_tables_.begin()).value();
    is_leaving_ahead_ = true;
    lock.unlock();
    try {
      static_cast<void>(background_evict(table_id).is_ok());  // a request that needs the room reports it
      close_holes();
    } catch (const std::bad_alloc&) {
    }
    lock.lock();
    is_leaving_ahead_ = false;
  }
}

bool Store::Tiering::is_making_room() const {
  const MutexLock lock(background_mutex_);
  return is_leaving_ahead_ || !background_tables_.empty();
}

// Once round the stripes, unless there is room enough, a request wants to evict, or others are to leave.
Status Store::Tiering::background_evict(std::uint32_t table_id) {
  for (std::uint32_t stripe = 0; stripe < kStripes && wanting_ == 0;) {
    const MutexLock lock(evicting_);
    const std::shared_ptr<Table> table = store_.tables.find(table_id);
    if (table == nullptr) return Status::ok();
    Counts room{};  // that each stripe is to have
    for (std::uint32_t each = 0; each < kStripes; ++each) {
      const std::shared_lock stripe_lock(store_.stripes[each].mutex);
      if (const auto& stripe_rows = table->stripes[each]; stripe_rows != nullptr)
        room[each] = stripe_rows->slab.rows() / kSpareShare;
    }
    Counts missing = missing_places(*table, room);
    if (stripe == 0) {
      const bool is_enough = sum_of(missing) * kUsed < sum_of(room) || excess(*table, room) == 0;
      if (is_enough || is_colder_elsewhere(*table, room)) return Status::ok();
    }
    std::fill_n(missing.begin(), stripe, 0);
    for (std::uint64_t rows = 0; stripe < kStripes && rows < kBatchAhead; ++stripe) rows += missing[stripe];
    std::fill(missing.begin() + stripe, missing.end(), 0);
    std::uint64_t removed = 0;
    Status status = evict_own(*table, missing, removed);
    background_evicted_ += removed;
    SR_RETURN_IF_ERROR(status);
  }
  return Status::ok();
}

// Evicts from the coldest places and moves what is left together, until `bytes` have come back.
Status Store::Tiering::shrink(std::uint64_t bytes, const Table& table, const Counts& rows, std::uint64_t& progress) {
  const std::uint64_t before = store_.pools.used_bytes();
  for (std::uint32_t tries = 0; tries < 4 * kStripes && store_.pools.used_bytes() + bytes > before; ++tries) {
    const bool is_over_share = excess_of_share(table, store_.bytes_for(table, rows)) > 0;
    const Place place = coldest_place(table, is_over_share);
    if (place.table == nullptr) break;
    std::uint64_t resident_rows = 0;
    {
      const std::shared_lock lock(store_.stripes[place.stripe].mutex);
      if (const auto& stripe_rows = place.table->stripes[place.stripe]; stripe_rows != nullptr)
        resident_rows = stripe_rows->slab.rows();
    }
    Eviction eviction;
    Counts collected{};
    collected[place.stripe] = std::max<std::uint64_t>(resident_rows / 8, 16);
    collect(*place.table, place.stripe, collected[place.stripe], eviction);
    collect_more(*place.table, collected, eviction);
    std::uint64_t removed = 0;
    Status status = carry_out(*place.table, eviction, removed);
    progress += removed;
    if (!status.is_ok() && progress == 0) return status;
    const std::uint64_t spare = place.table.get() == &table ? rows[place.stripe] : 0;
    compact(*place.table, place.stripe, spare);
  }
  if (store_.pools.used_bytes() < before) ++progress;
  return Status::ok();
}

Status Store::Tiering::write_to_ssd(SsdBatch& batch) {
  Status written = ssd_->write(batch);
  store_.pools.ssd_index = ssd_->index_bytes();
  return written;
}

// Writes changed rows, then takes those out of memory that are still as written. Empties the eviction.
Status Store::Tiering::carry_out(Table& table, Eviction& eviction, std::uint64_t& removed) {
  if (table.is_dropped) {
    eviction.victims.clear();
    eviction.batch.clear();
    return unknown_table(table.schema.id);
  }
  const Status written = write_to_ssd(eviction.batch);
  const std::vector<Victim>& victims = eviction.victims;
  for (std::size_t begin = 0; begin < victims.size();) {
    const std::uint32_t stripe = victims[begin].stripe;
    std::array<std::uint64_t, kRowsAtOnce> suffixes;
    std::array<std::uint32_t, kRowsAtOnce> ids;
    const std::size_t count = suffixes_of_stripe(std::span(victims).subspan(begin), std::span(suffixes));
    const std::unique_lock lock(store_.stripes[stripe].mutex);
    const LockTimer clock;
    table.find_all(stripe, std::span(suffixes).first(count), ids.data());
    for (const std::uint32_t id : std::span(ids).first(count)) {
      if (id == RowIndex::kNone) continue;
      __builtin_prefetch(table.stripes[stripe]->slab.head(id));
      table.stripes[stripe]->slab.fetch_meta(id);
    }
    std::uint64_t leaving = 0;
    for (std::size_t row = 0; row < count; ++row, ++begin) {
      const Victim& victim = victims[begin];
      const std::uint32_t id = ids[row];  // no row is a victim twice
      if (id == RowIndex::kNone || (victim.is_changed && !written.is_ok())) continue;
      RowMeta meta = table.stripes[stripe]->slab.meta(id);
      if (table.row(stripe, id).version() != victim.version) {
        meta.reset(static_cast<std::uint16_t>(meta.load() | RowMeta::kStored));
        continue;
      }
      meta.set_stored();
      if (meta.is_pinned()) continue;
      token_at(stripe, victim.suffix).fetch_add(1, std::memory_order_release);
      static_cast<void>(table.remove(stripe, victim.suffix));
      ++leaving;
    }
    table.ssd_rows[stripe] += leaving;
    removed += leaving;
    table.rows_evicted += leaving;
    rows_evicted_ += leaving;
    longest_lock_.note(clock.elapsed());
  }
  eviction.victims.clear();
  eviction.batch.clear();
  return written;
}

Status Store::Tiering::write_back() {
  const MutexLock lock(evicting_);
  for (const auto& table : store_.tables.all()) {
    for (std::uint32_t stripe = 0; stripe < store_.slots.stripe_count(); ++stripe) {
      std::uint64_t suffix = 0;
      do {
        Eviction eviction;
        eviction.image.resize(table->codec.bytes());
        {
          const std::shared_lock stripe_lock(store_.stripes[stripe].mutex);
          const TableStripe* stripe_rows = table->stripes[stripe].get();
          if (stripe_rows == nullptr) break;
          const RowIndex::Range range = stripe_rows->index.range_at(suffix);
          suffix = range.next;
          for (const RowIndex::Entry& entry : range.entries) {
            const RowMeta meta = stripe_rows->slab.meta(entry.row);
            if (!meta.is_changed()) continue;
            const RowRef row = stripe_rows->slab.at(entry.row);
            const std::uint64_t key = key_of_hash(table->schema.id, store_.slots.hash(stripe, entry.suffix));
            table->codec.encode(key, row, eviction.image.data());
            eviction.batch.put(key_of(*table, key), eviction.image, before_of(meta), stamps_of(*table, row.weights()));
            eviction.victims.push_back({key, entry.suffix, row.version(), static_cast<std::uint16_t>(stripe), true});
          }
        }
        SR_RETURN_IF_ERROR(write_to_ssd(eviction.batch));
        const std::unique_lock stripe_lock(store_.stripes[stripe].mutex);
        for (const Victim& victim : eviction.victims) {
          const std::uint32_t id = table->find(stripe, victim.suffix);
          if (id == RowIndex::kNone) continue;
          RowMeta meta = table->stripes[stripe]->slab.meta(id);
          const bool is_same = table->row(stripe, id).version() == victim.version;
          is_same ? meta.set_stored() : meta.reset(static_cast<std::uint16_t>(meta.load() | RowMeta::kStored));
        }
      } while (suffix != 0);
      // The SSD's index has grown by rows that took no memory less.
      SR_RETURN_IF_ERROR(evict_until(*table, Counts{}, [&] { return excess(*table, Counts{}) == 0; }));
    }
  }
  return ssd_->flush();
}

}  // namespace sparserow

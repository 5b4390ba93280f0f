#include "store/store.h"

#include <time.h>

#include <bit>
#include <utility>

#include "store/changes/change_log.h"
#include "store/open_ssd_tier.h"
#include "store/store_impl.h"
#include "store/tiering.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

Status no_filter(const std::string& table) {
  return {Code::kFailedPrecondition,
          "table " + table + ": its policy counts no keys (admit_after 1), there is no filter"};
}

}  // namespace

Status unknown_table(std::uint32_t table_id) {
  return {Code::kNotFound, "table id " + std::to_string(table_id) + " does not exist on this shard; create it first"};
}

std::uint32_t wall_ms() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME_COARSE, &now);  // a few milliseconds coarse, and some nanoseconds long
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(now.tv_sec) * 1000 +
                                    static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000);
}

Store::Impl::Impl(const StoreOptions& store_options)
    : options(store_options),
      slots(store_options.slot_count),
      versions(store_options.lineage, store_options.change_log_bytes),
      budget(store_options.memory_budget_bytes, pools),
      reserve(pools, budget) {
  const std::uint32_t slots_per_stripe = (options.slot_count + kStripes - 1) / kStripes;
  for (Stripe& stripe : stripes) {
    stripe.sequences.resize(slots_per_stripe);
    stripe.erasures.resize(slots_per_stripe);
  }
}

Store::Impl::~Impl() = default;

void Store::Impl::reset_table(std::uint32_t table_id) noexcept {
  const bool is_followed = tables.has_followers(table_id);
  for (Stripe& stripe : stripes) {
    const std::unique_lock lock(stripe.mutex);
    versions.reset_table(stripe, table_id, is_followed);
  }
}

Store::Impl::StripeCounts Store::Impl::count_absent(const Table& table, std::span<const std::uint64_t> keys) const {
  StripeCounts absent{};
  BatchOrder order;
  for (std::size_t begin = 0; begin < keys.size(); begin += BatchOrder::kBlock) {
    const auto block = keys.subspan(begin, std::min(BatchOrder::kBlock, keys.size() - begin));
    order.group(table.schema.id, slots, block);
    for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
      if (order.positions(stripe).empty()) continue;
      const std::shared_lock lock(stripes[stripe].mutex);
      walk_stripe<Fetch::kNothing>(table, order, stripe,
                                   [&](std::uint16_t /*position*/, std::uint64_t /*suffix*/, std::uint32_t id) {
                                     absent[stripe] += id == RowIndex::kNone ? 1 : 0;
                                   });
    }
  }
  return absent;
}

std::uint64_t Store::Impl::bytes_for(const Table& table, const StripeCounts& absent) const {
  constexpr std::uint64_t kGrowingAtOnce = 8;  // stripes, by as many threads
  std::uint64_t bytes = 0;
  std::uint64_t touched = 0;
  StorePools no_memory;
  const TableStripe empty(no_memory, table.layout.data_bytes, table.is_tiered, /*slot_bits=*/0, nullptr);
  for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
    if (absent[stripe] == 0) continue;
    const std::shared_lock lock(stripes[stripe].mutex);
    const TableStripe& rows = table.stripes[stripe] != nullptr ? *table.stripes[stripe] : empty;
    bytes += rows.slab.bytes_for(absent[stripe]) + rows.index.lasting_bytes_for(absent[stripe]);
    ++touched;
    if (table.admission != nullptr) bytes += table.admission->bytes_for(stripe, absent[stripe]);
  }
  return bytes + std::min(touched, kGrowingAtOnce) * RowIndex::kTransientBytes;
}

Store::Reservation::Reservation(Reservation&& other) noexcept
    : store_(std::exchange(other.store_, nullptr)),
      bytes_(other.bytes_.exchange(0)),
      memory_(std::move(other.memory_)),
      table_(std::move(other.table_)),
      pins_(std::exchange(other.pins_, {})),
      has_absent_(other.has_absent_),
      absences_(std::move(other.absences_)) {}

Store::Reservation& Store::Reservation::operator=(Reservation&& other) noexcept {
  if (this != &other) {
    release();
    store_ = std::exchange(other.store_, nullptr);
    bytes_ = other.bytes_.exchange(0);
    memory_ = std::move(other.memory_);
    table_ = std::move(other.table_);
    pins_ = std::exchange(other.pins_, {});
    has_absent_ = other.has_absent_;
    absences_ = std::move(other.absences_);
  }
  return *this;
}

Store::Reservation::~Reservation() { release(); }

void Store::Reservation::release() noexcept {
  if (store_ != nullptr && memory_ != nullptr) store_->impl_->budget.give_back(bytes_.exchange(0), *memory_);
  if (store_ != nullptr && table_ != nullptr) store_->unpin(*table_, pins_);
  pins_.clear();
  memory_ = nullptr;
  table_ = nullptr;
  store_ = nullptr;
}

void Store::Reservation::consume(std::uint64_t bytes) noexcept {
  if (memory_ == nullptr) return;
  std::uint64_t promised = bytes_.load();
  while (!bytes_.compare_exchange_weak(promised, promised - std::min(promised, bytes))) {
  }
  store_->impl_->budget.give_back(std::min(promised, bytes), *memory_);
}

Store::Store(const StoreOptions& options)
    : impl_(std::make_unique<Impl>(options)), changes_(std::make_unique<ChangeLog>(*this)) {}
Store::~Store() = default;

Result<std::unique_ptr<Store>> Store::create(const StoreOptions& options) {
  if (!std::has_single_bit(options.slot_count) || options.slot_count < 2 || options.slot_count > 65536) {
    return not_allowed("StoreOptions.slot_count", options.slot_count, kSlotCounts);
  }
  std::unique_ptr<Store> store(new Store(options));
  if (options.ssd.path.empty()) return store;
  if (options.memory_budget_bytes == 0) {
    return not_allowed("StoreOptions.memory_budget_bytes", options.memory_budget_bytes,
                       ">= 1, the memory of rows and indexes, with an ssd_path");
  }
  SsdOptions ssd_options = options.ssd;
  ssd_options.slot_count = options.slot_count;
  ssd_options.lineage = options.lineage;
  auto ssd = open_ssd_tier(ssd_options);
  if (!ssd.is_ok()) return ssd.status();
  store->impl_->tiering = std::make_unique<Tiering>(*store->impl_, std::move(ssd).value());
  return store;
}

Status Store::create_table(const TableSchema& schema) {
  SR_RETURN_IF_ERROR(validate(schema));
  const Result<bool> came_back = impl_->tables.add(schema, has_ssd(), [&] {
    return std::make_shared<Table>(schema, impl_->pools, impl_->budget.shares().of_table(schema.name), has_ssd(),
                                   impl_->options.slot_count);
  });
  SR_RETURN_IF_ERROR(came_back.status());
  // Followers keep the rows of the table of this id that was dropped. With whole slots they replace them.
  if (came_back.value()) impl_->reset_table(schema.id);
  return Status::ok();
}

Status Store::drop_table(std::uint32_t table_id) {
  if (impl_->tiering != nullptr) return impl_->tiering->drop(table_id);
  // Freed outside of the map's lock, when its last reader is done.
  const std::shared_ptr<Table> dropped = impl_->tables.remove(table_id);
  if (dropped == nullptr) return unknown_table(table_id);
  impl_->reset_table(table_id);
  return Status::ok();
}

std::optional<TableSchema> Store::schema(std::uint32_t table_id) const {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  return table == nullptr ? std::nullopt : std::optional(table->schema);
}

std::vector<std::uint32_t> Store::table_ids() const {
  std::vector<std::uint32_t> ids;
  for (const auto& table : impl_->tables.all()) ids.push_back(table->schema.id);
  return ids;
}

// The memory of so many new rows, if each gets a segment of an index for itself. Segments and chunks that grow may take
// more, but less than an eighth of what all indexes and rows have.
std::uint64_t Store::Impl::bytes_if_absent(const Table& table, std::uint64_t rows) {
  constexpr std::uint64_t kIndexBytes = 320;
  constexpr std::uint64_t kChunkBytes = 8 << 10;  // of a stripe that has none
  return rows * (table.layout.data_bytes / 8 * 9 + kIndexBytes) + std::min<std::uint64_t>(rows, kStripes) * kChunkBytes;
}

Result<Store::Reservation> Store::reserve(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (impl_->options.memory_budget_bytes == 0) return Reservation(this);
  if (impl_->tiering != nullptr) return reserve_tiered(table, keys);
  // A look at each key, whether it has a row, is a fifth of a push. It is left out, and memory is promised for all
  // keys, as long as that keeps used and promised bytes below half of the budget: the other half is left to exact
  // promises.
  const std::uint64_t most = Impl::bytes_if_absent(*table, keys.size());
  const bool is_far = impl_->budget.taken() + most <= impl_->options.memory_budget_bytes / 2;
  if (is_far && table->admission == nullptr && impl_->promise(*table, most).is_ok()) {
    return Reservation(this, most, table->memory);
  }
  const std::uint64_t bytes = impl_->bytes_for(*table, impl_->count_absent(*table, keys));
  SR_RETURN_IF_ERROR(impl_->promise(*table, bytes));
  return Reservation(this, bytes, table->memory);
}

Status Store::set_memory_shares(std::map<std::string, double> shares) {
  constexpr double kMost = 0.875;
  double sum = 0;
  for (const auto& [name, share] : shares) {
    sum += share;
    if (!(share > 0) || sum > kMost + 1e-9) {
      return not_allowed("memory share of namespace " + name, share, "above 0, and together at most 0.875");
    }
  }
  impl_->budget.shares().set(std::move(shares));
  return Status::ok();
}

std::vector<TableStats> Store::stats(std::span<const std::uint32_t> ids) const {
  std::vector<TableStats> all;
  for (const auto& table : ids.empty() ? impl_->tables.all() : impl_->tables.named(ids)) {
    TableStats stats;
    stats.table_id = table->schema.id;
    stats.name = table->schema.name;
    for (std::uint32_t stripe = 0; stripe < kStripes; ++stripe) {
      const std::shared_lock lock(impl_->stripes[stripe].mutex);
      stats.ssd_rows += table->ssd_rows[stripe];
      stats.rows_added += table->rows_added[stripe];
      if (table->stripes[stripe] == nullptr) continue;
      stats.rows += table->stripes[stripe]->slab.rows();
      stats.total_bytes += table->stripes[stripe]->bytes();
    }
    if (table->admission != nullptr) stats.admission = table->admission->stats();
    stats.rows_evicted = table->rows_evicted;
    stats.sweeps = table->swept.sweeps;
    {
      const MutexLock lock(table->swept.mutex);
      stats.ages = table->swept.ages;
    }
    for (std::size_t rule = 0; rule < kSweepRules; ++rule) stats.swept_rows[rule] = table->swept.rows[rule];
    stats.sweep_longest_lock = table->swept.longest_lock.longest();
    stats.rows += stats.ssd_rows;
    stats.ssd_bytes = stats.ssd_rows * table->codec.bytes();
    stats.row_bytes = stats.rows * table->layout.data_bytes;
    all.push_back(std::move(stats));
  }
  return all;
}

Result<std::vector<std::uint64_t>> Store::filter_image(std::uint32_t table_id, std::uint32_t slot) const {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (!table->schema.policy.has_filter()) return no_filter(table->schema.name);
  const std::uint32_t stripe = slot % impl_->slots.stripe_count();
  const std::shared_lock lock(impl_->stripes[stripe].mutex);
  return table->admission->image(stripe, slot / impl_->slots.stripe_count());
}

Status Store::load_filter(std::uint32_t table_id, std::uint32_t slot, std::span<const std::uint64_t> image) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (!table->schema.policy.has_filter()) return no_filter(table->schema.name);
  if (slot >= impl_->options.slot_count) return {Code::kInvalidArgument, "load_filter: no such slot"};
  const std::uint32_t stripe = slot % impl_->slots.stripe_count();
  const std::unique_lock lock(impl_->stripes[stripe].mutex);
  return table->admission->load(stripe, slot / impl_->slots.stripe_count(), image);
}

std::uint64_t Store::used_bytes() const noexcept { return impl_->pools.used_bytes(); }
ReserveStats Store::reserve_stats() const noexcept { return impl_->reserve.stats(); }
ChangeLog& Store::changes() noexcept { return *changes_; }
const StoreOptions& Store::options() const noexcept { return impl_->options; }
std::uint16_t Store::lineage() const noexcept { return impl_->versions.lineage(); }
void Store::set_lineage(std::uint16_t lineage) noexcept { impl_->versions.set_lineage(lineage); }

}  // namespace sparserow

#include "store/snapshot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "store/tiering.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kBytesUnderLock = 256u << 10;  // about so many are copied before the stripe is let go
constexpr std::size_t kHeadColumns = 20;             // bytes of a row's key, version and update count
constexpr std::size_t kTouchedAhead = 4u << 20;      // bytes for images that writers will need
constexpr std::uint64_t kTakenShare = 4;  // of the side buffer, from which on its images are taken out of turn
constexpr std::uint64_t kSliceNanoseconds = 1'000'000;   // of dumping, between which it may pause
constexpr std::uint64_t kPause = 3;                      // times the slice
constexpr std::size_t kFetchedAhead = 4;                 // rows
constexpr std::size_t kImageBytes = sizeof(SavedImage);  // of an image beside its data
constexpr std::uint64_t kSmallTableBytes = 4u << 20;     // of rows: a 64th of them is copied under a stripe's lock

}  // namespace

Store::Snapshot::Snapshot(Impl& store, SnapshotOptions options)
    : store_(store), options_(std::move(options)), slot_versions_(store.options.slot_count) {
  if (options_.side_budget_bytes == 0) {
    options_.side_budget_bytes = std::max(kLeastSideBytes, store_.pools.used_bytes() / 10);
  }
  image_budget_ = options_.side_budget_bytes - options_.side_budget_bytes / 4;
  for (const auto& table : store_.tables.all()) {
    auto& dump = dumps_[table->schema.id] = std::make_unique<Dump>();
    dump->table = table;
    dump->steps = table->steps();
    dump->images = std::make_unique<SavedImagePool>(table->layout.data_bytes);
    for (Side& side : dump->sides) side.pool = dump->images.get();
    by_table_[table.get()] = dump.get();
  }
  lineage_ = store_.versions.lineage();
  const std::uint32_t stripes = store_.slots.stripe_count();
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
    Impl::Stripe& shared = store_.stripes[stripe];
    const std::unique_lock lock(shared.mutex);
    for (std::uint32_t slot = stripe, at = 0; slot < slot_versions_.size(); slot += stripes, ++at) {
      slot_versions_[slot] = store_.versions.of_sequence(shared.sequences[at]);
      if (options_.since.empty()) continue;
      if (store_.versions.of_sequence(shared.erasures[at]) > options_.since[slot]) options_.since[slot] = 0;
    }
    for (const auto& [id, dump] : dumps_) {
      if (dump->table->schema.policy.has_filter()) dump->filters[stripe] = dump->table->admission->copy(stripe);
    }
    shared.snapshot = this;
  }
}

std::vector<std::uint64_t> Store::Snapshot::filter_image(std::uint32_t table_id, std::uint32_t slot) const {
  const auto found = dumps_.find(table_id);
  if (found == dumps_.end() || slot >= slot_versions_.size()) return {};
  const auto& filters = found->second->filters[slot % store_.slots.stripe_count()];
  return filters.empty() ? std::vector<std::uint64_t>{}
                         : TableAdmission::image_of(filters[slot / store_.slots.stripe_count()]);
}

Store::Snapshot::~Snapshot() { end(); }

void Store::Snapshot::end() {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(is_over_, true)) return;
    moved_.notify_all();
  }
  for (Impl::Stripe& stripe : store_.stripes) {
    const std::unique_lock lock(stripe.mutex);
    stripe.snapshot = nullptr;
  }
  store_.has_snapshot = false;
}

Result<std::shared_ptr<Store::Snapshot>> Store::snapshot(SnapshotOptions options) {
  if (!options.since.empty() && options.since.size() != impl_->options.slot_count) {
    return not_allowed("snapshot: number of versions in since", options.since.size(),
                       "0, or " + std::to_string(impl_->options.slot_count) + ", one for each slot");
  }
  if (impl_->has_snapshot.exchange(true)) {
    return Status(Code::kFailedPrecondition, "snapshot: the rows of this store are being saved already");
  }
  auto made = std::make_shared<Snapshot>(*impl_, std::move(options));
  const std::lock_guard lock(impl_->snapshot_mutex);
  impl_->snapshot = made;
  return made;
}

void Store::Impl::wait_for_snapshot() {
  if (!has_snapshot.load(std::memory_order_relaxed)) return;
  std::shared_ptr<Snapshot> open;
  {
    const std::lock_guard lock(snapshot_mutex);
    open = snapshot.lock();
  }
  if (open != nullptr) open->wait_for_room();
}

std::vector<TableSchema> Store::Snapshot::tables() const {
  std::vector<TableSchema> schemas;
  for (const auto& [id, dump] : dumps_) schemas.push_back(dump->table->schema);
  std::sort(schemas.begin(), schemas.end(),
            [](const TableSchema& left, const TableSchema& right) { return left.name < right.name; });
  return schemas;
}

const TableSchema* Store::Snapshot::schema(std::uint32_t table_id) const noexcept {
  const auto found = dumps_.find(table_id);
  return found == dumps_.end() ? nullptr : &found->second->table->schema;
}

bool Store::Snapshot::is_whole(std::uint32_t slot) const noexcept {
  return options_.since.empty() || options_.since[slot] == 0;
}

SnapshotStats Store::Snapshot::stats() const noexcept {
  return {.rows_saved = rows_saved_, .side_bytes_most = side_bytes_most_, .writes_stalled = writes_stalled_};
}

Store::Snapshot::Side* Store::Snapshot::side(const Table& table, std::uint32_t stripe) noexcept {
  if (is_given_up_.load(std::memory_order_relaxed)) return nullptr;
  const auto found = by_table_.find(&table);
  if (found == by_table_.end()) return nullptr;
  Side& side = found->second->sides[stripe];
  return side.is_done ? nullptr : &side;
}

void Store::Snapshot::save(Side& side, const Table& table, std::uint32_t stripe, std::uint64_t suffix,
                           std::uint64_t version, std::uint32_t update_count, const std::byte* data) {
  if (suffix < side.dumped || version == 0) return;  // handed out; or just created
  const std::uint32_t slot = store_.slots.slot_in_stripe(suffix) * store_.slots.stripe_count() + stripe;
  if (!is_wanted(slot, version)) return;
  if (side.by_slot.empty()) side.by_slot.resize(slot_versions_.size() / store_.slots.stripe_count());
  if (side.spare == nullptr) side.spare = side.pool->take();
  SavedImage* const image = side.spare;
  side.spare = image->next;
  image->suffix = suffix;
  image->version = version;
  image->update_count = update_count;
  std::memcpy(image->data(), data, table.layout.data_bytes);
  image->next = std::exchange(side.by_slot[store_.slots.slot_in_stripe(suffix)], image);
  ++rows_saved_;
  const std::uint64_t bytes = side_bytes_ += table.layout.data_bytes + kImageBytes;
  std::uint64_t most = side_bytes_most_;
  while (most < bytes && !side_bytes_most_.compare_exchange_weak(most, bytes)) {
  }
}

void Store::Snapshot::wait_for_room() {
  batches_.fetch_add(1, std::memory_order_relaxed);
  if (side_bytes_ < image_budget_ || is_given_up_) return;
  ++writes_stalled_;
  std::unique_lock lock(mutex_);
  const auto has_room = [this] { return is_over_ || is_given_up_ || side_bytes_ < image_budget_; };
  ++waiting_;
  moved_.notify_all();  // the dump may be pausing
  while (!has_room()) {
    const std::uint64_t before = pages_;
    if (moved_.wait_for(lock, options_.longest_stall, [&] { return has_room() || pages_ != before; })) continue;
    give_up();
  }
  --waiting_;
}

// While batches are written, a dump that did not have a CPU all the time, since others wanted it, pauses for a multiple
// of what it has computed; the less, the fuller the side buffer is. A low priority alone does not do: it holds within a
// session or a container, not between two of them.
void Store::Snapshot::keep_pace(Pace& pace) {
  const LockTimes now = pace.slice.elapsed();
  const LockTimes sum{pace.sum.wall_nanoseconds + now.wall_nanoseconds, pace.sum.cpu_nanoseconds + now.cpu_nanoseconds};
  pace.slice = LockTimer();
  pace.sum = sum;
  if (sum.wall_nanoseconds < kSliceNanoseconds) return;
  const std::uint64_t batches = batches_.load(std::memory_order_relaxed);
  const bool has_writers = std::exchange(pace.batches, batches) != batches;
  if (has_writers && sum.wall_nanoseconds - sum.wall_nanoseconds / 16 > sum.cpu_nanoseconds) {
    const double room = 1.0 - std::min(1.0, static_cast<double>(side_bytes_) / static_cast<double>(image_budget_));
    const auto pause = static_cast<std::int64_t>(room * static_cast<double>(kPause * sum.cpu_nanoseconds));
    std::unique_lock lock(mutex_);
    moved_.wait_for(lock, std::chrono::nanoseconds(pause), [this] { return is_over_ || waiting_ > 0; });
  }
  pace = {.slice = LockTimer(), .sum = {}, .batches = batches};
}

std::uint64_t Store::Snapshot::page_bytes(std::uint64_t most) const noexcept {
  return std::min(most, std::max(kLeastPageBytes, options_.side_budget_bytes / 16));
}

void Store::Snapshot::give_up() {
  is_given_up_ = true;
  moved_.notify_all();
}

void Store::Snapshot::add(Slot& slot, const Table& table, std::uint64_t suffix, std::uint64_t version,
                          std::uint32_t update_count, const std::byte* data) const {
  slot.rows.push_back({suffix, version, update_count, slot.data.size()});
  slot.data.insert(slot.data.end(), data, data + table.layout.data_bytes);
}

// Rows in memory that did not change since the cut, and saved images of those that did.
void Store::Snapshot::collect_memory(Dump& dump, std::uint32_t slot, Slot& out, bool& may_be_on_ssd) {
  const Table& table = *dump.table;
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  const std::size_t fetched = std::min(table.layout.data_bytes + RowLayout::kHeadBytes, kMaxFetched);
  std::uint64_t suffix = slots.first_suffix(in_stripe);
  for (bool is_end = false; !is_end;) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    const std::size_t most = out.data.size() + kBytesUnderLock;
    may_be_on_ssd = may_be_on_ssd || table.ssd_rows[stripe].load(std::memory_order_relaxed) > 0;
    const TableStripe* stripe_rows = table.stripes[stripe].get();
    is_end = stripe_rows == nullptr;
    while (!is_end && out.data.size() < most) {
      out.entries.clear();  // a segment has rows of other slots too
      const std::uint64_t next = stripe_rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) {
        if (at >= suffix && slots.slot_in_stripe(at) == in_stripe) out.entries.push_back({at, id});
      });
      for (std::size_t i = 0; i < out.entries.size(); ++i) {
        if (i + kFetchedAhead < out.entries.size()) {
          fetch_lines(stripe_rows->slab.data(out.entries[i + kFetchedAhead].row), fetched);
        }
        const RowRef row = stripe_rows->slab.at(out.entries[i].row);
        if (!is_wanted(slot, row.version())) continue;
        add(out, table, out.entries[i].suffix, row.version(), row.update_count(), row.weights());
      }
      suffix = next;
      is_end = suffix == 0 || slots.slot_in_stripe(suffix) != in_stripe;
    }
    // With an SSD what was seen here may still be somewhere else a moment later: all is handed out at the end.
    if (!table.is_tiered) take_images(dump, slot, suffix, is_end, out);
  }
}

bool Store::Snapshot::is_small(const Table& table, std::uint64_t max_bytes) const {
  std::uint64_t rows = 0;
  for (std::uint32_t stripe = 0; stripe < store_.slots.stripe_count(); ++stripe) {
    const std::shared_lock lock(store_.stripes[stripe].mutex);
    if (table.stripes[stripe] != nullptr) rows += table.stripes[stripe]->slab.rows();
    rows += table.ssd_rows[stripe];
  }
  return rows * (table.layout.data_bytes + kHeadColumns) <= std::min(max_bytes, kSmallTableBytes);
}

// As collect(), of all slots of a stripe at once. False, and nothing is taken, when the SSD alone has some of its rows.
bool Store::Snapshot::collect_stripe(Dump& dump, std::uint32_t stripe, Slot& out) {
  const Table& table = *dump.table;
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripes = slots.stripe_count();
  const auto per_stripe = static_cast<std::uint32_t>(slot_versions_.size()) / stripes;
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  if (table.ssd_rows[stripe] > 0) return false;
  if (const TableStripe* rows = table.stripes[stripe].get(); rows != nullptr) {
    for (std::uint64_t suffix = 0;;) {
      out.entries.clear();
      const std::uint64_t next =
          rows->index.visit_range(suffix, [&](std::uint64_t at, std::uint32_t id) { out.entries.push_back({at, id}); });
      for (const RowIndex::Entry& entry : out.entries) {
        const RowRef row = rows->slab.at(entry.row);
        const std::uint32_t slot = slots.slot_in_stripe(entry.suffix) * stripes + stripe;
        if (is_wanted(slot, row.version()))
          add(out, table, entry.suffix, row.version(), row.update_count(), row.weights());
      }
      if (next == 0) break;
      suffix = next;
    }
  }
  const bool has_images = !dump.sides[stripe].by_slot.empty();
  for (std::uint32_t at = has_images ? 0 : per_stripe - 1; at < per_stripe; ++at) {
    take_images(dump, at * stripes + stripe, 0, true, out);
  }
  return true;
}

Result<SnapshotPage> Store::Snapshot::whole_table(Dump& dump, std::uint64_t max_bytes, SnapshotPage used) {
  SnapshotPage page = begin_page(dump, std::min(max_bytes, kSmallTableBytes), std::move(used));
  const std::uint32_t stripes = store_.slots.stripe_count();
  Slot rows;
  Pace pace;
  const auto put_rows = [&](std::uint32_t stripe) {
    for (const Row& row : rows.rows) {
      put(page, dump, stripe, row.suffix, row.version, row.update_count, rows.data.data() + row.at);
    }
    rows.clear();
    keep_pace(pace);
  };
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
    SR_RETURN_IF_ERROR(failure());
    if (collect_stripe(dump, stripe, rows)) {
      std::sort(rows.rows.begin(), rows.rows.end(),
                [](const Row& left, const Row& right) { return left.suffix < right.suffix; });
      put_rows(stripe);
      continue;
    }
    for (std::uint32_t slot = stripe; slot < slot_versions_.size(); slot += stripes) {
      SR_RETURN_IF_ERROR(collect(dump, slot, rows));
      put_rows(stripe);
    }
  }
  note_progress();
  dump.slot = static_cast<std::uint32_t>(slot_versions_.size());
  dump.images->clear();
  page.end_slot = dump.slot;
  return page;
}

// Takes the images of suffixes before end_suffix (of the whole slot, at its end); these suffixes count as handed out
// from now on. The caller shares the stripe's lock: only writers, which have it exclusively, read sides.
void Store::Snapshot::take_images(Dump& dump, std::uint32_t slot, std::uint64_t end_suffix, bool is_end, Slot& out) {
  const SlotOrder& slots = store_.slots;
  const std::uint32_t stripe = slot % slots.stripe_count();
  const std::uint32_t in_stripe = slot / slots.stripe_count();
  Side& side = dump.sides[stripe];
  SavedImage* taken = nullptr;
  SavedImage* last = nullptr;
  std::size_t count = 0;
  for (SavedImage** at = side.by_slot.empty() ? &taken : &side.by_slot[in_stripe]; *at != nullptr;) {
    SavedImage* const image = *at;
    if (!is_end && image->suffix >= end_suffix) {
      at = &image->next;
      continue;
    }
    const auto known = out.by_path.find(image->suffix);
    if (known == out.by_path.end()) {
      add(out, *dump.table, image->suffix, image->version, image->update_count, image->data());
    } else {  // read from the SSD, which may have an older one
      Row& row = out.rows[known->second];
      row.version = image->version;
      row.update_count = image->update_count;
      std::memcpy(out.data.data() + row.at, image->data(), dump.table->layout.data_bytes);
    }
    ++count;
    *at = image->next;
    image->next = taken;
    taken = image;
    if (last == nullptr) last = image;
  }
  dump.images->give(taken, last, count);
  side.dumped = is_end ? slots.first_suffix(in_stripe + 1) : end_suffix;
  side.is_done = is_end && slot + slots.stripe_count() >= slot_versions_.size();
  side_bytes_ -= count * (dump.table->layout.data_bytes + kImageBytes);
}

Status Store::Snapshot::collect(Dump& dump, std::uint32_t slot, Slot& out) {
  bool may_be_on_ssd = false;
  collect_memory(dump, slot, out, may_be_on_ssd);
  Table& table = *dump.table;
  if (table.is_tiered) {
    for (std::size_t i = 0; i < out.rows.size(); ++i) out.by_path.emplace(out.rows[i].suffix, i);
    if (may_be_on_ssd) {
      if (store_.tables.find(table.schema.id) != dump.table) {
        return {Code::kNotFound, "table " + table.schema.name + " was dropped while it was saved"};
      }
      SR_RETURN_IF_ERROR(store_.tiering->visit_slot(table, slot, [&](std::uint64_t suffix, const RowImage& image) {
        if (!is_wanted(slot, image.version) || !out.by_path.emplace(suffix, out.rows.size()).second) return;
        add(out, table, suffix, image.version, image.update_count, image.data);
      }));
    }
    const std::unique_lock lock(store_.stripes[slot % store_.slots.stripe_count()].mutex);
    take_images(dump, slot, 0, true, out);
  }
  std::sort(out.rows.begin(), out.rows.end(),
            [](const Row& left, const Row& right) { return left.suffix < right.suffix; });
  note_progress();
  return Status::ok();
}

void Store::Snapshot::note_progress() {
  const std::lock_guard lock(mutex_);
  ++pages_;
  moved_.notify_all();
}

Status Store::Snapshot::failure() const {
  if (!is_given_up_) return Status::ok();
  return {Code::kResourceExhausted, "the save was given up: its side buffer of " + std::to_string(image_budget_) +
                                        " bytes was full and nothing was written for " +
                                        std::to_string(options_.longest_stall.count()) + " ms; training goes on"};
}

SnapshotPage Store::Snapshot::begin_page(const Dump& dump, std::uint64_t max_bytes, SnapshotPage used) const {
  const Table& table = *dump.table;
  std::size_t expected = max_bytes / (table.layout.data_bytes + kHeadColumns) + 1;
  expected += expected / 8;  // the last slot goes beyond
  SnapshotPage page = std::move(used);
  page.keys.clear();
  page.versions.clear();
  page.update_counts.clear();
  page.weights.clear();
  page.state.clear();
  page.age_steps.clear();
  page.push_seconds.clear();
  page.keys.reserve(expected);  // memory that is not touched costs nothing
  page.versions.reserve(expected);
  page.update_counts.reserve(expected);
  page.weights.reserve(expected * table.schema.dim * size_of(table.schema.dtype));
  page.state.reserve(expected * table.optimizer->state_floats());
  page.first_slot = dump.slot;
  return page;
}

void Store::Snapshot::put(SnapshotPage& page, const Dump& dump, std::uint32_t stripe, std::uint64_t suffix,
                          std::uint64_t version, std::uint32_t update_count, const std::byte* data) const {
  const Table& table = *dump.table;
  const RowPolicy& policy = table.schema.policy;
  page.keys.push_back(key_of_hash(table.schema.id, store_.slots.hash(stripe, suffix)));
  page.versions.push_back(version);
  page.update_counts.push_back(update_count);
  page.weights.insert(page.weights.end(), data, data + table.schema.dim * size_of(table.schema.dtype));
  const auto* state = reinterpret_cast<const float*>(data + table.layout.state_offset);
  page.state.insert(page.state.end(), state, state + table.optimizer->state_floats());
  const auto* stamp = reinterpret_cast<const std::uint32_t*>(data + table.layout.stamp_offset);
  if (policy.stamps_steps()) page.age_steps.push_back(dump.steps - *stamp++);
  if (policy.stamps_seconds()) page.push_seconds.push_back(*stamp);
}

Result<SnapshotPage> Store::Snapshot::next(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used) {
  const auto found = dumps_.find(table_id);
  if (found == dumps_.end()) return unknown_table(table_id);
  Dump& dump = *found->second;
  if (dump.slot == 0 && is_small(*dump.table, max_bytes)) return whole_table(dump, max_bytes, std::move(used));
  SnapshotPage page = begin_page(dump, max_bytes, std::move(used));
  const std::uint64_t row_bytes = dump.table->layout.data_bytes + kHeadColumns;
  Slot& slot = slot_;
  Pace pace;
  while (dump.slot < slot_versions_.size() && page.keys.size() * row_bytes < max_bytes) {
    SR_RETURN_IF_ERROR(failure());
    slot.clear();
    if (side_bytes_ + kTouchedAhead <= image_budget_) dump.images->touch_ahead(kTouchedAhead);
    SR_RETURN_IF_ERROR(collect(dump, dump.slot, slot));
    const std::uint32_t stripe = dump.slot % store_.slots.stripe_count();
    ++dump.slot;
    for (const Row& row : slot.rows) {
      put(page, dump, stripe, row.suffix, row.version, row.update_count, slot.data.data() + row.at);
    }
    keep_pace(pace);
  }
  if (dump.slot == slot_versions_.size()) dump.images->clear();  // all sides are done
  page.end_slot = dump.slot;
  return page;
}

Result<SnapshotPage> Store::Snapshot::next_images(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used) {
  const auto found = dumps_.find(table_id);
  if (found == dumps_.end()) return unknown_table(table_id);
  Dump& dump = *found->second;
  SnapshotPage page = begin_page(dump, max_bytes, std::move(used));
  page.end_slot = static_cast<std::uint32_t>(slot_versions_.size());
  SR_RETURN_IF_ERROR(failure());
  if (dump.table->is_tiered || side_bytes_ < image_budget_ / kTakenShare) return page;
  const std::uint64_t row_bytes = dump.table->layout.data_bytes + kImageBytes;
  for (std::uint32_t stripe = 0; stripe < kStripes && page.keys.size() * row_bytes < max_bytes; ++stripe) {
    std::vector<SavedImage*> by_slot;
    {
      const std::shared_lock lock(store_.stripes[stripe].mutex);  // suffices, see take_images()
      by_slot.swap(dump.sides[stripe].by_slot);
    }
    std::vector<SavedImage*> images;
    for (SavedImage* image : by_slot) {
      for (; image != nullptr; image = image->next) images.push_back(image);
    }
    if (images.empty()) continue;
    std::sort(images.begin(), images.end(),
              [](const SavedImage* left, const SavedImage* right) { return left->suffix < right->suffix; });
    for (std::size_t i = 0; i < images.size(); ++i) {
      put(page, dump, stripe, images[i]->suffix, images[i]->version, images[i]->update_count, images[i]->data());
      images[i]->next = i + 1 < images.size() ? images[i + 1] : nullptr;
    }
    dump.images->give(images.front(), images.back(), images.size());
    side_bytes_ -= images.size() * row_bytes;
  }
  note_progress();
  return page;
}

}  // namespace sparserow

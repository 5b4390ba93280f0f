#include "store/snapshot.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "util/not_allowed.h"

namespace sparserow {
namespace {

constexpr std::size_t kTouchedAhead = 4u << 20;  // bytes for images that writers will need
constexpr std::uint64_t kTakenShare = 4;         // of the side buffer, from which on its images are taken out of turn
constexpr std::uint64_t kSliceNanoseconds = 1'000'000;  // of dumping, between which it may pause
constexpr std::uint64_t kPause = 3;                     // times the slice

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
    const MutexLock lock(mutex_);
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
  const MutexLock lock(impl_->snapshot_mutex);
  impl_->snapshot = made;
  return made;
}

void Store::Impl::wait_for_snapshot() {
  if (!has_snapshot.load(std::memory_order_relaxed)) return;
  std::shared_ptr<Snapshot> open;
  {
    const MutexLock lock(snapshot_mutex);
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
  if (const Versions wanted = versions_of(slot); version < wanted.first || version > wanted.last) return;
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
  const MutexLock lock(mutex_);
  const auto has_room = [this]() SR_REQUIRES(mutex_) {
    if (is_over_ || is_given_up_) return true;
    return side_bytes_ < image_budget_;
  };
  ++waiting_;
  moved_.notify_all();  // the dump may be pausing
  while (!has_room()) {
    const std::uint64_t before = pages_;
    if (moved_.wait_for(mutex_, options_.longest_stall,
                        [&]() SR_REQUIRES(mutex_) { return has_room() || pages_ != before; }))
      continue;
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
    const MutexLock lock(mutex_);
    moved_.wait_for(mutex_, std::chrono::nanoseconds(pause),
                    [this]() SR_REQUIRES(mutex_) { return is_over_ || waiting_ > 0; });
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

Result<SnapshotPage> Store::Snapshot::whole_table(Dump& dump, std::uint64_t max_bytes, SnapshotPage used) {
  SnapshotPageWriter writer = begin_page(dump, std::min(max_bytes, kSmallTableBytes), std::move(used));
  const std::uint32_t stripes = store_.slots.stripe_count();
  Pace pace;
  for (std::uint32_t stripe = 0; stripe < stripes; ++stripe) {
    SR_RETURN_IF_ERROR(failure());
    if (collect_stripe(dump, stripe, range_)) {
      writer.put(stripe, range_);
      keep_pace(pace);
      continue;
    }
    for (std::uint32_t slot = stripe; slot < slot_versions_.size(); slot += stripes) {
      for (std::uint64_t from = 0;;) {
        SR_RETURN_IF_ERROR(collect(dump, slot, from, UINT64_MAX, range_));
        writer.put(stripe, range_);
        keep_pace(pace);
        if ((from = range_.end()) == 0) break;
      }
    }
  }
  note_progress();
  dump.slot = static_cast<std::uint32_t>(slot_versions_.size());
  dump.images->clear();
  return writer.take(0, dump.slot);
}

void Store::Snapshot::note_progress() {
  const MutexLock lock(mutex_);
  ++pages_;
  moved_.notify_all();
}

Status Store::Snapshot::failure() const {
  if (!is_given_up_) return Status::ok();
  return {Code::kResourceExhausted, "the save was given up: its side buffer of " + std::to_string(image_budget_) +
                                        " bytes was full and nothing was written for " +
                                        std::to_string(options_.longest_stall.count()) + " ms; training goes on"};
}

SnapshotPageWriter Store::Snapshot::begin_page(const Dump& dump, std::uint64_t max_bytes, SnapshotPage used) const {
  return {*dump.table, store_.slots, dump.steps, max_bytes, std::move(used)};
}

Result<SnapshotPage> Store::Snapshot::next(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used) {
  const auto found = dumps_.find(table_id);
  if (found == dumps_.end()) return unknown_table(table_id);
  Dump& dump = *found->second;
  if (dump.slot == 0 && is_small(*dump.table, max_bytes)) return whole_table(dump, max_bytes, std::move(used));
  SnapshotPageWriter writer = begin_page(dump, max_bytes, std::move(used));
  const std::uint32_t first_slot = dump.slot;
  const std::uint64_t row_bytes = dump.table->layout.data_bytes + SnapshotPage::kHeadBytes;
  const std::uint64_t most_rows = std::max<std::uint64_t>(1, max_bytes / row_bytes);
  Pace pace;
  // A little room is left: a range of few rows costs as much as a large one where few of its rows are wanted.
  const std::uint64_t most_used = most_rows - most_rows / 16;
  while (dump.slot < slot_versions_.size() && writer.rows() < most_used) {
    SR_RETURN_IF_ERROR(failure());
    if (side_bytes_ + kTouchedAhead <= image_budget_) dump.images->touch_ahead(kTouchedAhead);
    SR_RETURN_IF_ERROR(collect(dump, dump.slot, dump.suffix, most_rows - writer.rows(), range_));
    writer.put(dump.slot % store_.slots.stripe_count(), range_);
    dump.suffix = range_.end();
    if (dump.suffix == 0) ++dump.slot;
    keep_pace(pace);
  }
  if (dump.slot == slot_versions_.size()) dump.images->clear();  // all sides are done
  return writer.take(first_slot, dump.slot);
}

Result<SnapshotPage> Store::Snapshot::next_images(std::uint32_t table_id, std::uint64_t max_bytes, SnapshotPage used) {
  const auto found = dumps_.find(table_id);
  if (found == dumps_.end()) return unknown_table(table_id);
  Dump& dump = *found->second;
  SnapshotPageWriter writer = begin_page(dump, max_bytes, std::move(used));
  const auto end_slot = static_cast<std::uint32_t>(slot_versions_.size());
  SR_RETURN_IF_ERROR(failure());
  if (dump.table->is_tiered || side_bytes_ < image_budget_ / kTakenShare) return writer.take(dump.slot, end_slot);
  const std::uint64_t row_bytes = dump.table->layout.data_bytes + kImageBytes;
  for (std::uint32_t stripe = 0; stripe < kStripes && writer.rows() * row_bytes < max_bytes; ++stripe) {
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
      writer.put(stripe, images[i]->suffix, images[i]->version, images[i]->update_count, images[i]->data());
      images[i]->next = i + 1 < images.size() ? images[i + 1] : nullptr;
    }
    dump.images->give(images.front(), images.back(), images.size());
    side_bytes_ -= images.size() * row_bytes;
  }
  note_progress();
  return writer.take(dump.slot, end_slot);
}

}  // namespace sparserow

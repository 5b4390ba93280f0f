// The way up: misses are looked up on the SSD and brought to memory. The way down is eviction.cc.
#include "store/tiering.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace sparserow {
namespace {

constexpr std::chrono::seconds kLongestRead{60};

}  // namespace

Store::Tiering::Tiering(Impl& store, std::unique_ptr<SsdTier> ssd)
    : store_(store),
      ssd_(std::move(ssd)),
      tokens_(std::make_unique<std::atomic<std::uint32_t>[]>(std::size_t{kStripes} * kTokens)),
      ahead_([this] { run_background_evict(); }) {}

Store::Tiering::~Tiering() {
  {
    const MutexLock lock(background_mutex_);
    is_ending_ = true;
  }
  ahead_asked_.notify_all();
  ahead_.join();
}

SsdKey Store::Tiering::key_of(const Table& table, std::uint64_t key) const noexcept {
  return ssd_key(store_.slots.slot(row_hash(table.schema.id, key)), table.schema.id, key);
}

// From now on the table is refused: a row that may be wrong must not be trained on.
Status Store::Tiering::lost(Table& table, const Status& why) const {
  if (why.code() != Code::kDataLoss) return why;
  table.fail({Code::kDataLoss, "table " + table.schema.name + ": " + why.message() +
                                   "; this shard refuses the table; drop it, and make it anew from a checkpoint or an "
                                   "export of its rows"});
  return table.failure();
}

Status Store::Tiering::resolve(Table& table, std::vector<Miss> misses, bool must_install, const Visit& visit) {
  while (!misses.empty()) {
    SR_RETURN_IF_ERROR(table.failure());
    std::vector<Miss> theirs, again;
    theirs.reserve(misses.size());
    {
      const Claims claims(*this, table, misses, theirs);  // which are given back also where the look-up throws
      SR_RETURN_IF_ERROR(look_up(table, misses, must_install, visit, again));
    }
    SR_RETURN_IF_ERROR(wait_for(table, theirs));
    again.insert(again.end(), theirs.begin(), theirs.end());
    misses = std::move(again);
    visit_resident(table, misses, visit);
  }
  return Status::ok();
}

Status Store::Tiering::look_up(Table& table, std::vector<Miss>& misses, bool must_install, const Visit& visit,
                               std::vector<Miss>& again) {
  if (misses.empty()) return Status::ok();
  // A stripe's misses follow each other, so that its lock is taken for many of them, and each part of the SSD's index
  // is read once. They come so from a batch, but not when those of two rounds are joined.
  const auto by_stripe = [](const Miss& left, const Miss& right) { return left.stripe < right.stripe; };
  if (!std::is_sorted(misses.begin(), misses.end(), by_stripe)) {
    std::stable_sort(misses.begin(), misses.end(), by_stripe);
  }
  for (Miss& miss : misses) miss.token = token(miss.stripe, miss.suffix);
  std::vector<SsdKey> keys(misses.size());
  for (std::size_t i = 0; i < misses.size(); ++i) keys[i] = key_of(table, misses[i].key);
  SsdImages stored;
  if (Status status = ssd_->read(keys, stored); !status.is_ok()) return lost(table, status);
  std::vector<RowImage> images(misses.size());
  Counts found{};
  std::uint64_t rows_found = 0;
  for (std::size_t i = 0; i < misses.size(); ++i) {
    if (stored.at(i).empty()) continue;
    const auto image = table.codec.decode(misses[i].key, stored.at(i));
    if (!image.is_ok()) return lost(table, image.status());
    images[i] = image.value();
    ++found[misses[i].stripe];
    ++rows_found;
  }
  const bool has_room = rows_found == 0 || make_room(table, found).is_ok();
  for (std::size_t begin = 0; begin < misses.size();) {
    const std::uint32_t stripe = misses[begin].stripe;
    std::array<std::uint64_t, kRowsAtOnce> suffixes;
    std::array<std::uint32_t, kRowsAtOnce> ids;
    const std::size_t count = suffixes_of_stripe(std::span(std::as_const(misses)).subspan(begin), std::span(suffixes));
    const std::unique_lock lock(store_.stripes[stripe].mutex);
    const LockTimer clock;
    // Each row is claimed once, so that none of these comes to memory by another one's turn.
    table.find_all(stripe, std::span(suffixes).first(count), ids.data());
    for (std::size_t row = 0; row < count; ++row, ++begin) {
      const Miss& miss = misses[begin];
      const RowImage* image = images[begin].data == nullptr ? nullptr : &images[begin];
      std::uint32_t id = ids[row];
      if (id == RowIndex::kNone && token(stripe, miss.suffix) != miss.token) {
        again.push_back(miss);
        continue;
      }
      if (id == RowIndex::kNone && image != nullptr && (has_room || must_install)) {
        id = table.install(stripe, miss.suffix, *image, is_back_soon(table, miss, *image));
        if (id != RowIndex::kNone) --table.ssd_rows[stripe];
      }
      visit(miss, id, id == RowIndex::kNone ? image : nullptr);
    }
    longest_lock_.note(clock.elapsed());
  }
  store_.pools.collapse_huge_pages();
  request_background_evict(table, rows_found);
  return Status::ok();
}

// Takes out those that came to memory meanwhile.
void Store::Tiering::visit_resident(Table& table, std::vector<Miss>& misses, const Visit& visit) {
  std::erase_if(misses, [&](const Miss& miss) {
    const std::unique_lock lock(store_.stripes[miss.stripe].mutex);
    const std::uint32_t id = table.find(miss.stripe, miss.suffix);
    if (id == RowIndex::kNone) return false;
    visit(miss, id, nullptr);
    return true;
  });
}

Store::Tiering::Claims::Claims(Tiering& tiering, const Table& table, std::vector<Miss>& misses,
                               std::vector<Miss>& theirs)
    : tiering_(tiering) {
  mine_.reserve(misses.size());
  const MutexLock lock(tiering_.claims_mutex_);
  try {
    std::erase_if(misses, [&](const Miss& miss) SR_REQUIRES(tiering_.claims_mutex_) {
      const std::uint64_t hash = row_hash(table.schema.id, miss.key);
      if (tiering_.claims_.insert(hash)) {
        mine_.push_back(hash);
        return false;
      }
      theirs.push_back(miss);
      return true;
    });
  } catch (...) {
    for (const std::uint64_t hash : mine_) tiering_.claims_.erase(hash);
    tiering_.claims_changed_.notify_all();
    throw;
  }
}

Store::Tiering::Claims::~Claims() {
  {
    const MutexLock lock(tiering_.claims_mutex_);
    for (const std::uint64_t hash : mine_) tiering_.claims_.erase(hash);
  }
  tiering_.claims_changed_.notify_all();
}

Status Store::Tiering::wait_for(const Table& table, const std::vector<Miss>& misses) {
  const auto deadline = std::chrono::steady_clock::now() + kLongestRead;
  MutexLock lock(claims_mutex_);
  for (const Miss& miss : misses) {
    const std::uint64_t hash = row_hash(table.schema.id, miss.key);
    if (!claims_changed_.wait_until(claims_mutex_, deadline,
                                    [&]() SR_REQUIRES(claims_mutex_) { return !claims_.contains(hash); })) {
      return {Code::kUnavailable, "table " + table.schema.name + ": the SSD did not answer in " +
                                      std::to_string(kLongestRead.count()) + " s"};
    }
  }
  return Status::ok();
}

Status Store::Tiering::read_stored(Table& table, std::uint64_t key, const std::function<void(const RowImage&)>& visit) {
  SR_RETURN_IF_ERROR(table.failure());
  const SsdKey asked = key_of(table, key);
  SsdImages stored;
  if (Status status = ssd_->read({&asked, 1}, stored); !status.is_ok()) return lost(table, status);
  if (stored.at(0).empty()) return Status::ok();
  const auto image = table.codec.decode(key, stored.at(0));
  if (!image.is_ok()) return lost(table, image.status());
  visit(image.value());
  return Status::ok();
}

Status Store::Tiering::visit_slot(Table& table, std::uint32_t slot, std::uint64_t from, const VisitStored& visit) {
  SR_RETURN_IF_ERROR(table.failure());
  const std::uint64_t first = store_.slots.hash(slot % store_.slots.stripe_count(), from);
  const Status status = ssd_->visit_slot(
      slot, table.schema.id, first, [&](std::uint64_t key, std::span<const std::byte> stored) -> Result<bool> {
        const auto image = table.codec.decode(key, stored);
        if (!image.is_ok()) return image.status();
        return visit(store_.slots.suffix(row_hash(table.schema.id, key)), image.value());
      });
  return status.is_ok() ? status : lost(table, status);
}

SsdStamps Store::Tiering::stamps_of(const Table& table, const std::byte* data) noexcept {
  const RowPolicy& policy = table.schema.policy;
  const std::byte* const stamps = data + table.layout.stamp_offset;
  SsdStamps out;
  if (policy.stamps_steps()) std::memcpy(&out.steps, stamps, sizeof out.steps);
  if (policy.stamps_seconds()) {
    std::memcpy(&out.seconds, stamps + (policy.stamps_steps() ? sizeof out.steps : 0), sizeof out.seconds);
  }
  return out;
}

Status Store::Tiering::visit_table(Table& table, const SsdTier::WantsStamps& wants, const VisitRow& visit) {
  SR_RETURN_IF_ERROR(table.failure());
  const std::uint32_t slot_count = store_.options.slot_count;
  Status refused;  // by visit(): the SSD is well
  const Status status = ssd_->visit_table(
      table.schema.id, slot_count, wants,
      [&](std::uint64_t key, std::span<const std::byte> stored) -> Result<std::optional<SsdStamps>> {
        const auto image = table.codec.decode(key, stored);
        if (!image.is_ok()) return image.status();
        const std::uint64_t hash = row_hash(table.schema.id, key);
        const Result<bool> goes_on = visit(store_.slots.stripe(hash), store_.slots.suffix(hash), image.value());
        if (!goes_on.is_ok()) refused = goes_on.status();
        if (!goes_on.is_ok() || !goes_on.value()) return std::optional<SsdStamps>();
        return std::optional(stamps_of(table, image.value().data));
      });
  if (!refused.is_ok()) return refused;
  return status.is_ok() ? status : lost(table, status);
}

}  // namespace sparserow

#include "store/table/table.h"

namespace sparserow {

// Steps that a job left out count when it comes back; one that is behind its own last step adds none.
std::uint32_t Table::tick(std::uint64_t job, std::int64_t step) {
  if (step < 0) return steps();
  const MutexLock lock(clock_mutex_);
  const auto [at, is_new] = job_steps_.try_emplace(job, step);
  if (is_new) forget_former(job_steps_, job);
  const std::int64_t passed = is_new ? 1 : std::max<std::int64_t>(step - at->second, 0);
  at->second = std::max(at->second, step);
  return steps_ += static_cast<std::uint32_t>(passed);
}

void Table::catch_up(const ClockSteps& job_steps) {
  const MutexLock lock(clock_mutex_);
  for (auto& [job, last] : job_steps_) {
    const auto at = job_steps.find(job);
    if (at == job_steps.end() || at->second <= last) continue;
    steps_ += static_cast<std::uint32_t>(at->second - last);
    last = at->second;
  }
}

void Table::forget_job(std::uint32_t job_id) {
  const MutexLock lock(clock_mutex_);
  std::erase_if(job_steps_, [job_id](const auto& entry) { return job_of_clock(entry.first) == job_id; });
}

std::size_t Table::job_clocks() const {
  const MutexLock lock(clock_mutex_);
  return job_steps_.size();
}

TableStripe& Table::stripe_at(std::uint32_t stripe) {
  std::unique_ptr<TableStripe>& stripe_rows = stripes[stripe];
  if (stripe_rows == nullptr) {
    stripe_rows =
        std::make_unique<TableStripe>(*pools_, layout.data_bytes, is_tiered, slot_bits_in_suffix_, &memory->used);
  }
  return *stripe_rows;
}

void Table::make_room(std::uint32_t stripe, std::span<const std::uint64_t> suffixes) {
  stripe_at(stripe).index.make_room(suffixes);
}

// A place for the row, and its entry in the index.
std::uint32_t Table::add_place(std::uint32_t stripe, std::uint64_t suffix) {
  TableStripe& stripe_rows = stripe_at(stripe);
  const std::uint32_t id = stripe_rows.slab.allocate();
  if (id == RowSlab::kNone) return RowIndex::kNone;
  if (!stripe_rows.index.insert(suffix, id)) {
    stripe_rows.slab.free(id);
    return RowIndex::kNone;
  }
  return id;
}

std::uint32_t Table::add(std::uint32_t stripe, std::uint64_t suffix, std::uint64_t key, float* scratch) {
  const std::uint32_t id = add_place(stripe, suffix);
  if (id == RowIndex::kNone) return id;
  RowRef row = stripes[stripe]->slab.at(id);
  row.set_version(0);
  row.set_update_count(0);
  if (scratch != nullptr) {
    initial_rows.fill(key, scratch);
    convert_from_float(schema.dtype, scratch, row.weights(), schema.dim);
  } else {
    std::memset(row.weights(), 0, row_bytes(schema.dtype, schema.dim));
  }
  ++rows_added[stripe];
  optimizer->init_state(row.weights(), row.state(layout));
  std::fill_n(row.stamps(layout), schema.policy.stamps(), 0u);
  if (is_tiered) stripes[stripe]->slab.meta(id).reset(0);  // the push that adds it changes it
  return id;
}

std::uint32_t Table::install(std::uint32_t stripe, std::uint64_t suffix, const RowImage& image, bool is_back_soon) {
  const std::uint32_t id = add_place(stripe, suffix);
  if (id == RowIndex::kNone) return id;
  RowRef row = stripes[stripe]->slab.at(id);
  std::memcpy(row.weights(), image.data, layout.data_bytes);
  row.set_version(image.version);
  row.set_update_count(image.update_count);
  stripes[stripe]->slab.meta(id).bring(brought[stripe].are_pushed(), is_back_soon);
  brought[stripe].add_brought();
  return id;
}

bool Table::remove(std::uint32_t stripe, std::uint64_t suffix) {
  std::unique_ptr<TableStripe>& stripe_rows = stripes[stripe];
  if (stripe_rows == nullptr) return false;
  const std::uint32_t id = stripe_rows->index.erase(suffix);
  if (id == RowIndex::kNone) return false;
  stripe_rows->slab.free(id);
  if (stripe_rows->slab.rows() == 0) stripe_rows.reset();
  return true;
}

bool Table::begin_compaction(std::uint32_t stripe, std::uint64_t spare_rows) {
  TableStripe* stripe_rows = stripes[stripe].get();
  return stripe_rows != nullptr && stripe_rows->slab.close_chunks(spare_rows);
}

std::uint64_t Table::compact(std::uint32_t stripe, std::uint64_t suffix) {
  TableStripe* stripe_rows = stripes[stripe].get();
  if (stripe_rows == nullptr) return 0;  // its last row went meanwhile
  const RowIndex::Range range = stripe_rows->index.range_at(suffix);
  for (const RowIndex::Entry& entry : range.entries) {
    if (!stripe_rows->slab.is_closed(entry.row)) continue;
    const std::uint32_t id = stripe_rows->slab.allocate();
    if (id == RowSlab::kNone) return 0;  // its chunk stays closed, with the rows that are left
    std::memcpy(stripe_rows->slab.data(id), stripe_rows->slab.data(entry.row), layout.data_bytes);
    std::memcpy(stripe_rows->slab.head(id), stripe_rows->slab.head(entry.row), RowLayout::kHeadBytes);
    stripe_rows->slab.meta(id).reset(stripe_rows->slab.meta(entry.row).load());
    stripe_rows->index.replace(entry.suffix, id);
    stripe_rows->slab.free(entry.row);
  }
  return range.next;
}

Status Table::failure() const {
  if (!has_failed_.load(std::memory_order_acquire)) return Status::ok();
  const MutexLock lock(failure_mutex_);
  return failure_;
}

void Table::fail(Status why) {
  const MutexLock lock(failure_mutex_);
  if (failure_.is_ok()) failure_ = std::move(why);
  has_failed_.store(true, std::memory_order_release);
}

}  // namespace sparserow

// Store::sweep: looks at every row of a table, and removes those that its policy no longer wants.
//
// Rows in memory are looked at under their stripe's shared lock, for about kSlice at a time; rows on the SSD without a
// lock, by segment, of which the log of pages passes over those whose rows are all too new. Where the table has a bound
// they are looked at by slot, after those of that slot in memory: each row counts once then. What is to go is removed
// by Store::erase with the version that was seen, as DELETE does it, a few rows at once. Between slices it sleeps in
// proportion to the CPU time that it took. max_rows and max_bytes need two rounds: the first counts the rows that the
// other rules leave by how long they were not used, the second removes the coldest.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <thread>
#include <unordered_set>

#include "store/store_impl.h"
#include "store/tiering.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

using Clock = std::chrono::steady_clock;

// Short ones, so that a pull meets little of one: where all CPUs are busy a slice is time that others wait for theirs.
constexpr auto kSlice = std::chrono::microseconds(100);
constexpr auto kLongestSlice = 4 * kSlice;  // of one that is within an index segment, which it would have to sort again
constexpr std::size_t kLookedAtOnce = 16;   // rows between two looks at the clock
constexpr std::size_t kVisitedAhead = 8;    // rows
constexpr std::size_t kRemovedAtOnce = 1024;  // rows that are collected before they are removed
constexpr std::size_t kErasedAtOnce = 64;     // of them; with an SSD all, since each time it is read and written
constexpr std::size_t kVisitedPerRest = 256;  // rows of the SSD
constexpr auto kLeastPause = std::chrono::microseconds(200);  // shorter ones are added up

// Bins of about 3 %: values below 64 have one each.
constexpr std::uint32_t kBins = 64 + 26 * 32;
constexpr std::uint32_t bin_of(std::uint32_t value) noexcept {
  if (value < 64) return value;
  const auto exponent = static_cast<std::uint32_t>(std::bit_width(value)) - 1;  // 6 to 31
  return 64 + (exponent - 6) * 32 + ((value >> (exponent - 5)) & 31);
}

// What a sweep sees of a row.
struct Seen {
  std::uint64_t suffix;
  std::uint64_t version;
  std::uint32_t update_count;
  const std::byte* data;
};

}  // namespace

class Store::Sweep {
 public:
  Sweep(Store& store, std::shared_ptr<Table> table, const SweepOptions& options)
      : store_(store),
        impl_(*store.impl_),
        table_(std::move(table)),
        policy_(table_->schema.policy),
        options_(options),
        now_seconds_(static_cast<std::uint32_t>(impl_.unix_seconds())),
        now_steps_(table_->steps()) {
    weights_.resize(table_->schema.dim);
    if (policy_.has_bound()) bins_.resize(kBins);
  }

  Result<SweepReport> run() {
    SR_RETURN_IF_ERROR(table_->failure());
    SR_RETURN_IF_ERROR(walk([this](std::uint32_t stripe, const Seen& row) { judge(stripe, row); }));
    report_.rows_seen = seen_;
    const std::uint64_t excess = policy_.has_bound() && report_.is_complete ? cut_off() : 0;
    if (excess > 0 && options_.dry_run) count(SweepRule::kBound, excess);
    if (excess > 0 && !options_.dry_run) {
      SR_RETURN_IF_ERROR(walk([this](std::uint32_t stripe, const Seen& row) { judge_bound(stripe, row); }));
    }
    SweepTotals& totals = table_->swept;
    if (!options_.dry_run) ++totals.sweeps;
    if (report_.is_complete) {
      const MutexLock lock(totals.mutex);
      totals.ages = report_.ages;
    }
    report_.longest_lock = longest_lock_.longest();
    totals.longest_lock.note(report_.longest_lock);
    return report_;
  }

 private:
  // Steps and seconds since a stamp; what is stamped later than the sweep began is new.
  static std::uint32_t age(std::uint32_t now, std::uint32_t stamp) noexcept {
    const std::uint32_t passed = now - stamp;
    return passed >> 31 != 0 ? 0 : passed;
  }

  [[nodiscard]] bool is_past_steps(SsdStamps stamps) const noexcept {
    return policy_.evict_after_steps > 0 && age(now_steps_, stamps.steps) >= policy_.evict_after_steps;
  }
  [[nodiscard]] bool is_past_seconds(SsdStamps stamps) const noexcept {
    return options_.by_seconds && policy_.evict_after_seconds > 0 &&
           age(now_seconds_, stamps.seconds) >= policy_.evict_after_seconds;
  }

  std::optional<SweepRule> rule_of(const Seen& row, SsdStamps stamps) {
    if (is_past_steps(stamps)) return SweepRule::kSteps;
    if (is_past_seconds(stamps)) return SweepRule::kSeconds;
    if (policy_.evict_below_norm > 0 && norm(row.data) < static_cast<double>(policy_.evict_below_norm)) {
      return SweepRule::kNorm;
    }
    return std::nullopt;
  }

  double norm(const std::byte* data) {
    convert_to_float(table_->schema.dtype, data, weights_.data(), table_->schema.dim);
    double sum = 0;
    for (const float weight : weights_) sum += static_cast<double>(weight) * static_cast<double>(weight);
    return std::sqrt(sum);
  }

  // 0 goes first.
  std::uint32_t warmth(const Seen& row) const {
    if (policy_.evict_by == EvictBy::kLfu) return bin_of(row.update_count);
    std::uint32_t stamp = 0;
    std::memcpy(&stamp, row.data + table_->layout.stamp_offset, sizeof stamp);
    return kBins - 1 - bin_of(age(now_steps_, stamp));
  }

  void judge(std::uint32_t stripe, const Seen& row) {
    ++seen_;
    const SsdStamps stamps = Tiering::stamps_of(*table_, row.data);
    if (const auto rule = rule_of(row, stamps)) return take(stripe, row, *rule);
    if (policy_.stamps_steps()) ++report_.ages.steps[std::bit_width(age(now_steps_, stamps.steps))];
    if (policy_.stamps_seconds()) ++report_.ages.seconds[std::bit_width(age(now_seconds_, stamps.seconds))];
    if (!bins_.empty()) ++bins_[warmth(row)];
  }

  // After the first round: below warmth_ all go, of those in it `left_`. Returns how many go.
  std::uint64_t cut_off() {
    std::uint64_t rows = 0;
    for (const std::uint64_t count : bins_) rows += count;
    std::uint64_t bound = ~std::uint64_t{0};
    if (policy_.max_rows > 0) bound = part_of(policy_.max_rows);
    if (policy_.max_bytes > 0) bound = std::min(bound, part_of(policy_.max_bytes) / table_->layout.data_bytes);
    if (rows <= bound) return 0;
    left_ = rows - bound;
    for (warmth_ = 0; bins_[warmth_] < left_; ++warmth_) left_ -= bins_[warmth_];
    return rows - bound;
  }

  [[nodiscard]] std::uint64_t part_of(std::uint64_t whole) const {
    return static_cast<std::uint64_t>(std::ceil(static_cast<double>(whole) * options_.share));
  }

  void judge_bound(std::uint32_t stripe, const Seen& row) {
    const std::uint32_t warm = warmth(row);
    if (warm < warmth_) take(stripe, row, SweepRule::kBound);
    if (warm == warmth_ && left_ > 0) ties_.push_back(row);
  }

  // Equally warm rows of a slot go in the order of their suffixes, wherever they are.
  void settle_ties(std::uint32_t stripe) {
    std::sort(ties_.begin(), ties_.end(),
              [](const Seen& left, const Seen& right) { return left.suffix < right.suffix; });
    for (const Seen& row : ties_) {
      if (left_ == 0) break;
      --left_;
      take(stripe, row, SweepRule::kBound);
    }
    ties_.clear();
  }

  void take(std::uint32_t stripe, const Seen& row, SweepRule rule) {
    if (options_.dry_run) {
      count(rule, 1);
      return;
    }
    keys_.push_back(key_of_hash(table_->schema.id, impl_.slots.hash(stripe, row.suffix)));
    versions_.push_back(row.version);
    rules_.push_back(rule);
  }

  void count(SweepRule rule, std::uint64_t rows) {
    SweepReport::Freed& freed = report_.freed[static_cast<std::size_t>(rule)];
    freed.rows += rows;
    freed.bytes += rows * table_->layout.data_bytes;
  }

  // Sleeps for its share of a time that it worked.
  void rest(std::uint64_t worked_nanoseconds) {
    owed_ += std::chrono::nanoseconds(
        static_cast<std::int64_t>(static_cast<double>(worked_nanoseconds) * options_.pause_ratio));
    if (owed_ < kLeastPause) return;
    std::this_thread::sleep_for(owed_);
    owed_ = {};
  }

  // By runs of one rule, so that each is counted for what it removed.
  Status remove_taken() {
    const std::size_t at_once = impl_.tiering == nullptr ? kErasedAtOnce : kRemovedAtOnce;
    for (std::size_t begin = 0; begin < keys_.size();) {
      const LockTimer clock;
      std::size_t end = begin;
      while (end < keys_.size() && rules_[end] == rules_[begin] && end - begin < at_once) ++end;
      const auto erased = store_.erase(table_->schema.id, std::span(keys_).subspan(begin, end - begin),
                                       std::span(versions_).subspan(begin, end - begin));
      if (!erased.is_ok()) return erased.status();
      count(rules_[begin], erased.value());
      table_->swept.rows[static_cast<std::size_t>(rules_[begin])] += erased.value();
      begin = end;
      rest(clock.elapsed().cpu_nanoseconds);
    }
    keys_.clear();
    versions_.clear();
    rules_.clear();
    return Status::ok();
  }

  template <class Visit>
  Status walk(Visit&& visit) {
    const SlotOrder& slots = impl_.slots;
    const std::uint32_t slots_per_stripe = impl_.options.slot_count / slots.stripe_count();
    for (std::uint32_t stripe = 0; stripe < slots.stripe_count(); ++stripe) {
      if (table_->ssd_rows[stripe] == 0 || !policy_.has_bound()) {
        SR_RETURN_IF_ERROR(walk_memory(stripe, 0, 0, nullptr, visit));  // what leaves memory meanwhile: next time
        if (!report_.is_complete) break;
        continue;
      }
      for (std::uint32_t slot = 0; slot < slots_per_stripe && report_.is_complete; ++slot) {
        const std::uint64_t end = slot + 1 < slots_per_stripe ? slots.first_suffix(slot + 1) : 0;
        std::unordered_set<std::uint64_t> in_memory;
        SR_RETURN_IF_ERROR(walk_memory(stripe, slots.first_suffix(slot), end, &in_memory, visit));
        SR_RETURN_IF_ERROR(walk_ssd(stripe, slot, in_memory, visit));
      }
      if (!report_.is_complete) break;
    }
    const bool is_by_segment = impl_.tiering != nullptr && !policy_.has_bound() && report_.is_complete;
    return is_by_segment ? walk_segments(visit) : Status::ok();
  }

  // Rows that are on the SSD alone. What moves between memory and the SSD meanwhile: next time; a dry run counts a row
  // twice that leaves memory, or is moved in the log, meanwhile.
  template <class Visit>
  Status walk_segments(Visit&& visit) {
    std::uint64_t seen = seen_;
    for (const auto& rows : table_->ssd_rows) seen += rows.load(std::memory_order_relaxed);
    std::optional<LockTimer> clock(std::in_place);
    std::size_t visited = 0;
    const auto wants = [this](SsdStamps oldest) {
      return policy_.evict_below_norm > 0 || is_past_steps(oldest) || is_past_seconds(oldest);
    };
    const Status status = impl_.tiering->visit_table(
        *table_, wants, [&](std::uint32_t stripe, std::uint64_t suffix, const RowImage& image) -> Result<bool> {
          bool is_in_memory = false;
          {
            const std::shared_lock lock(impl_.stripes[stripe].mutex);
            is_in_memory = table_->find(stripe, suffix) != RowIndex::kNone;
          }
          if (!is_in_memory) visit(stripe, Seen{suffix, image.version, image.update_count, image.data});
          if (keys_.size() >= kRemovedAtOnce) {
            SR_RETURN_IF_ERROR(remove_taken());
            clock.emplace();
          }
          if (++visited % kVisitedPerRest == 0) {
            rest(clock->elapsed().cpu_nanoseconds);
            clock.emplace();
          }
          report_.is_complete = !impl_.sweeps_stopped.load(std::memory_order_relaxed);
          return report_.is_complete;
        });
    seen_ = seen;
    SR_RETURN_IF_ERROR(status);
    return remove_taken();
  }

  // Rows of a stripe with begin <= suffix < end (0: to the last).
  template <class Visit>
  Status walk_memory(std::uint32_t stripe, std::uint64_t begin, std::uint64_t end,
                     std::unordered_set<std::uint64_t>* in_memory, Visit&& visit) {
    std::uint64_t suffix = begin;
    do {
      if (impl_.sweeps_stopped.load(std::memory_order_relaxed)) {
        report_.is_complete = false;
        break;
      }
      LockTimes locked;
      {
        const std::shared_lock lock(impl_.stripes[stripe].mutex);
        const LockTimer clock;
        suffix = walk_slice(stripe, suffix, end, Clock::now(), in_memory, visit);
        locked = clock.elapsed();
      }
      if (in_memory == nullptr) settle_ties(stripe);
      ++report_.slices;
      longest_lock_.note(locked);
      if (keys_.size() >= kRemovedAtOnce) SR_RETURN_IF_ERROR(remove_taken());
      rest(locked.cpu_nanoseconds);
    } while (suffix != 0);
    return remove_taken();
  }

  // Returns where to go on; 0 at the end.
  template <class Visit>
  std::uint64_t walk_slice(std::uint32_t stripe, std::uint64_t suffix, std::uint64_t end, Clock::time_point start,
                           std::unordered_set<std::uint64_t>* in_memory, Visit&& visit) {
    const TableStripe* stripe_rows = table_->stripes[stripe].get();
    if (stripe_rows == nullptr) return 0;
    std::size_t looked_at = 0;
    do {
      RowIndex::Range range = stripe_rows->index.range_at(suffix);
      std::erase_if(range.entries, [suffix, end](const RowIndex::Entry& entry) {
        return entry.suffix < suffix || (end != 0 && entry.suffix >= end);
      });
      std::sort(range.entries.begin(), range.entries.end(),
                [](const RowIndex::Entry& left, const RowIndex::Entry& right) { return left.suffix < right.suffix; });
      for (std::size_t i = 0; i < range.entries.size(); ++i) {
        const RowIndex::Entry& entry = range.entries[i];
        if (i + kVisitedAhead < range.entries.size()) {
          __builtin_prefetch(stripe_rows->slab.data(range.entries[i + kVisitedAhead].row));
        }
        if (looked_at++ % kLookedAtOnce == kLookedAtOnce - 1 && Clock::now() - start >= kLongestSlice)
          return entry.suffix;
        if (in_memory != nullptr) in_memory->insert(entry.suffix);
        if (table_->is_tiered && stripe_rows->slab.meta(entry.row).is_pinned()) continue;
        const RowRef row = stripe_rows->slab.at(entry.row);
        visit(stripe, Seen{entry.suffix, row.version(), row.update_count(), row.weights()});
      }
      suffix = range.next;
      if (end != 0 && suffix >= end) suffix = 0;
    } while (suffix != 0 && Clock::now() - start < kSlice);
    return suffix;
  }

  template <class Visit>
  Status walk_ssd(std::uint32_t stripe, std::uint32_t slot, const std::unordered_set<std::uint64_t>& in_memory,
                  Visit&& visit) {
    if (!report_.is_complete) return Status::ok();
    SR_RETURN_IF_ERROR(
        impl_.tiering->visit_slot(*table_, slot * impl_.slots.stripe_count() + stripe, impl_.slots.first_suffix(slot),
                                  [&](std::uint64_t suffix, const RowImage& image) {
                                    if (!in_memory.contains(suffix))
                                      visit(stripe, Seen{suffix, image.version, image.update_count, image.data});
                                    return true;
                                  }));
    settle_ties(stripe);
    return remove_taken();
  }

  Store& store_;
  Impl& impl_;
  const std::shared_ptr<Table> table_;
  const RowPolicy& policy_;
  const SweepOptions options_;
  const std::uint32_t now_seconds_;
  const std::uint32_t now_steps_;
  SweepReport report_;
  LongestLock longest_lock_;
  std::chrono::nanoseconds owed_{0};  // of sleep
  std::uint64_t seen_ = 0;
  std::vector<float> weights_;
  std::vector<std::uint64_t> bins_;  // rows by warmth; empty without a bound
  std::uint32_t warmth_ = 0;
  std::uint64_t left_ = 0;
  std::vector<Seen> ties_;           // their data are not looked at again
  std::vector<std::uint64_t> keys_;  // to be removed, with what was seen of each
  std::vector<std::uint64_t> versions_;
  std::vector<SweepRule> rules_;
};

Result<SweepReport> Store::sweep(std::uint32_t table_id, const SweepOptions& options) {
  const std::shared_ptr<Table> table = impl_->tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  if (!(options.share >= 0 && options.share <= 1)) {
    return not_allowed("sweep.share", options.share, "[0, 1]");
  }
  if (!table->schema.policy.sweeps()) return SweepReport{};
  impl_->job_steps.age(*table);
  return Sweep(*this, table, options).run();
}

void Store::note_step(std::uint64_t job, std::int64_t step) { impl_->job_steps.note(job, step); }

void Store::forget_job(std::uint32_t job_id) { impl_->job_steps.forget(job_id, impl_->tables.all()); }

std::size_t Store::job_clocks() const {
  std::size_t clocks = impl_->job_steps.size();
  for (const auto& table : impl_->tables.all()) clocks += table->job_clocks();
  return clocks;
}

void Store::stop_sweeps() noexcept { impl_->sweeps_stopped = true; }

}  // namespace sparserow

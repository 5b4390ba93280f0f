// Which rows leave memory: first where they are coldest, then which of a stripe. See tiering.h.
#include <algorithm>
#include <limits>

#include "store/tiering.h"
#include "util/random.h"

namespace sparserow {
namespace {

constexpr int kLooks = 64;         // at rows of a segment, to see how warm they are
constexpr int kPasses = 8;         // of a clock hand over one stripe: the hottest row has cooled down after four
constexpr int kChoosyPasses = 2;   // of them; after that it takes any row without heat
constexpr std::uint64_t kFew = 8;  // one row of so many goes at a time, so that those left are worth more
// docs/measurements/tiers.md has what other numbers give.
constexpr std::uint64_t kProbation = 40;       // one row of so many is on probation
constexpr std::uint64_t kWaiting = 3;          // one row of so many may wait for its push beyond that
constexpr std::uint64_t kWaitingOfPulls = 16;  // the same where few pushes come
constexpr double kSoon = 1.2;  // a row is back soon when so many times the rows of memory were updated since
constexpr std::uint32_t kMostUpdates = 8;  // that count, so that what has gone out of use does not stay for them

}  // namespace

std::uint64_t Store::Tiering::next_random() noexcept { return mix_bits(++random_); }

// The coldest of some stripes of some tables where rows may leave; of tables that have a part of memory of their own,
// only where they are over it, or it is theirs that is wanted. own_only: of `wanting` alone. Tables of other namespaces
// that are within their parts (memory_shares.h) lose rows only where no others have any to lose.
Store::Tiering::Place Store::Tiering::coldest_place(const Table& wanting, bool own_only) {
  std::vector<std::shared_ptr<Table>> tables = store_.tables.all();
  std::erase_if(tables, [&](const std::shared_ptr<Table>& table) {
    if (own_only) return table.get() != &wanting;
    return table->schema.policy.ram_share > 0 && table.get() != &wanting && excess_of_share(*table, 0) == 0;
  });
  if (own_only) return coldest_of(tables);
  std::vector<std::shared_ptr<Table>> beyond = tables;
  std::erase_if(beyond, [&](const std::shared_ptr<Table>& table) {
    return table->memory != wanting.memory && store_.budget.shares().is_within_part(*table->memory);
  });
  Place best = coldest_of(beyond);
  return best.table != nullptr || beyond.size() == tables.size() ? best : coldest_of(tables);
}

Store::Tiering::Place Store::Tiering::coldest_of(const std::vector<std::shared_ptr<Table>>& tables) {
  Place best;
  constexpr int kSamples = 6;
  const std::uint64_t places = tables.size() * store_.slots.stripe_count();
  for (int sample = 0; sample < kSamples && places > 0; ++sample) {
    const std::uint64_t first = next_random() % places;
    double heat = -1;
    for (std::uint64_t step = 0; step < places && heat < 0; ++step) {
      const std::uint64_t at = (first + step) % places;  // of a stripe all tables, then of the next
      const auto& table = tables[at % tables.size()];
      const auto stripe = static_cast<std::uint32_t>(at / tables.size());
      heat = heat_of(*table, stripe);
      if (heat >= 0 && (best.table == nullptr || heat < best.heat)) best = {table, stripe, heat};
    }
    if (heat < 0) break;
  }
  return best;
}

// On average, of some of the rows that may leave; -1 where there are none. They may be anywhere among the suffixes: a
// checkpoint brings rows in the order of these, and those that came first have left.
double Store::Tiering::heat_of(const Table& table, std::uint32_t stripe) {
  std::uint64_t suffix = next_random();
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  const TableStripe* stripe_rows = table.stripes[stripe].get();
  if (stripe_rows == nullptr) return -1;
  double sum = 0;
  double rows = 0;
  for (int rounds = 0; rows == 0 && rounds < 2; rounds += suffix == 0) {
    int looked_at = 0;
    suffix = stripe_rows->index.visit_range(suffix, [&](std::uint64_t, std::uint32_t row) {
      const RowMeta meta = stripe_rows->slab.meta(row);
      if (looked_at++ >= kLooks || meta.is_pinned()) return;
      sum += meta.warmth();
      ++rows;
    });
  }
  return rows == 0 ? -1 : sum / rows;
}

// The policy is S3-FIFO (Yang et al., SOSP 2023) without its queues. In a segment of the index, rows on probation
// beyond their share leave, eldest first, and those that were used again are kept. Where probation is within its share,
// the rows that are kept cool, and those that are worth least leave. A row's version stands for the ghost queue: it
// shows how long the row was away (is_back_soon).
//
// A row that came and was not pushed yet has the version of an earlier push, which says nothing of its age. It counts
// as young while it waits for its push (row_meta.h), and as the eldest when the clock hand has passed it too often.
// Where pulls alone bring rows, as in an evaluation, that is one pass, and few rows may wait.

// Finds the rows of a segment that may leave, except those in `taken`; the first to leave have the least worth. Returns
// the first suffix of the next segment, 0 after the last one.
std::uint64_t Store::Tiering::sort_out(const Table& table, std::uint32_t stripe, std::uint64_t suffix,
                                       const std::unordered_set<std::uint64_t>& taken, SegmentRows& out) const {
  constexpr float kEldest = -std::numeric_limits<float>::max();
  const TableStripe& rows = *table.stripes[stripe];
  out.probation.clear();
  out.main.clear();
  out.victims.clear();
  out.rows = 0;
  const std::uint64_t next = rows.index.visit_range(suffix, [&](std::uint64_t row_suffix, std::uint32_t row) {
    ++out.rows;
    RowMeta meta = rows.slab.meta(row);
    if (meta.is_pinned() || (!taken.empty() && taken.contains(row_suffix))) return;
    if (meta.is_awaited() && meta.heat() > 0) {
      meta.cool();
      return;
    }
    if (!meta.is_main() || meta.heat() == 0) __builtin_prefetch(rows.slab.head(row));
    (meta.is_main() ? out.main : out.probation).push_back({row_suffix, row, 0});
  });
  for (Cold& row : out.probation) {
    const RowMeta meta = rows.slab.meta(row.row);
    if (const int waits = meta.waits(); waits > 0 && !meta.is_awaited()) {
      row.worth = static_cast<float>(waits);
    } else {
      row.worth = meta.is_changed() ? -static_cast<float>(age_of(stripe, row.suffix, rows.slab.at(row.row))) : kEldest;
    }
  }
  std::sort(out.probation.begin(), out.probation.end(),
            [](const Cold& left, const Cold& right) { return left.worth < right.worth; });
  return next;
}

// Takes at most `most` rows of a segment that are on probation, of the `beyond` eldest. Returns how many of these stay
// because they wait for their push, at most `most_waiting`.
std::uint64_t Store::Tiering::end_probation(const Table& table, std::uint32_t stripe, SegmentRows& segment,
                                            std::uint64_t beyond, std::uint64_t most, std::uint64_t most_waiting) {
  std::uint64_t waiting = 0;
  std::uint64_t left = beyond;
  for (const Cold& row : std::span(segment.probation).first(beyond)) {
    --left;
    RowMeta meta = table.stripes[stripe]->slab.meta(row.row);
    const bool is_used = !meta.is_awaited() && meta.is_used_again();
    if (row.worth > 0 && (is_used || left < most_waiting)) {
      meta.wait_less();
      ++waiting;
    } else if (is_used) {
      meta.keep();
    } else if (most > 0) {
      --most;
      segment.victims.push_back(row);
    }
  }
  for (const Cold& row : std::span(segment.probation).subspan(beyond)) {
    if (row.worth > 0) table.stripes[stripe]->slab.meta(row.row).wait_less();
  }
  return waiting;
}

// Takes at most `most` of a segment's rows that are kept and have no heat, those that are worth least. The others cool.
void Store::Tiering::end_stay(const Table& table, std::uint32_t stripe, SegmentRows& segment,
                              std::uint64_t most) const {
  const TableStripe& rows = *table.stripes[stripe];
  std::erase_if(segment.main, [&](const Cold& row) {
    RowMeta meta = rows.slab.meta(row.row);
    const bool is_warm = meta.heat() > 0;
    if (is_warm) meta.cool();
    return is_warm;
  });
  for (Cold& row : segment.main) row.worth = worth_of(stripe, row.suffix, rows.slab.at(row.row));
  const auto count = static_cast<std::ptrdiff_t>(std::min<std::uint64_t>(most, segment.main.size()));
  std::nth_element(segment.main.begin(), segment.main.begin() + count, segment.main.end(),
                   [](const Cold& left, const Cold& right) { return left.worth < right.worth; });
  segment.victims.insert(segment.victims.end(), segment.main.begin(), segment.main.begin() + count);
}

// Their rows are fetched at once, since nothing but their heads was read yet.
void Store::Tiering::add_victims(const Table& table, std::uint32_t stripe, const SegmentRows& segment,
                                 Eviction& out) const {
  const TableStripe& rows = *table.stripes[stripe];
  const std::size_t fetched = fetched_bytes<Fetch::kRow>(table);
  for (const Cold& cold : segment.victims) {
    if (rows.slab.meta(cold.row).is_changed()) fetch_lines(rows.slab.data(cold.row), fetched);
  }
  for (const Cold& cold : segment.victims) {
    const RowRef row = rows.slab.at(cold.row);
    const RowMeta meta = rows.slab.meta(cold.row);
    const std::uint64_t key = key_of_hash(table.schema.id, store_.slots.hash(stripe, cold.suffix));
    out.victims.push_back({key, cold.suffix, row.version(), static_cast<std::uint16_t>(stripe), meta.is_changed()});
    if (!meta.is_changed()) continue;
    table.codec.encode(key, row, out.image.data());
    out.batch.put(key_of(table, key), out.image, before_of(meta), stamps_of(table, row.weights()));
  }
}

// Appends `want` rows that no request needs in memory; fewer where there are not so many, or a few more. A clock hand
// goes over the stripe, a segment of its index at a time.
void Store::Tiering::collect(Table& table, std::uint32_t stripe, std::uint64_t want, Eviction& out) {
  out.image.resize(table.codec.bytes());
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  const TableStripe* stripe_rows = table.stripes[stripe].get();
  if (stripe_rows == nullptr) return;
  const std::uint64_t rows = stripe_rows->slab.rows();
  want = std::min(want, rows);
  std::uint64_t& clock_hand = table.clock_hands[stripe];
  const std::size_t first = out.victims.size();
  std::unordered_set<std::uint64_t> taken;  // suffixes, once the clock hand has come round
  std::size_t known = first;                // victims up to here are in it
  SegmentRows segment;
  for (std::uint64_t passed = 0; out.victims.size() - first < want && passed < kPasses * rows;) {
    for (; passed >= rows && known < out.victims.size(); ++known) taken.insert(out.victims[known].suffix);
    clock_hand = sort_out(table, stripe, clock_hand, taken, segment);
    // While it is choosy the same part goes of every segment, also where that is more than is wanted: if a segment were
    // passed for a row or two, rows would lose their heat faster than others leave.
    const bool is_choosy = passed < kChoosyPasses * rows;
    const std::uint64_t most =
        is_choosy ? segment.rows * std::max(rows / kFew, 2 * want) / rows + 1 : want - (out.victims.size() - first);
    const std::uint64_t spared = is_choosy ? segment.rows / kProbation : 0;
    const std::uint64_t beyond = segment.probation.size() - std::min<std::uint64_t>(spared, segment.probation.size());
    const std::uint64_t most_waiting =
        is_choosy ? segment.rows / (table.brought[stripe].are_pushed() ? kWaiting : kWaitingOfPulls) : 0;
    const std::uint64_t waiting = end_probation(table, stripe, segment, beyond, most, most_waiting);
    const std::uint64_t rest = most - segment.victims.size();
    // Rows that wait for their push take the place of kept ones.
    const std::uint64_t share = beyond == 0 || !is_choosy ? rest : std::min(rest, waiting);
    if (share > 0) end_stay(table, stripe, segment, share);
    add_victims(table, stripe, segment, out);
    passed += segment.rows;
  }
}

// The updates of the row's slot since its own last one.
std::uint64_t Store::Tiering::age_of(std::uint32_t stripe, std::uint64_t suffix, RowRef row) const noexcept {
  return updates_since(stripe, suffix, row.version());
}

std::uint64_t Store::Tiering::updates_since(std::uint32_t stripe, std::uint64_t suffix,
                                            std::uint64_t version) const noexcept {
  const std::uint64_t now = store_.stripes[stripe].sequences[store_.slots.slot_in_stripe(suffix)];
  return now - std::min(now, version & kSequence);
}

// How much a row is worth keeping: its updates, squared, by its age. The count distinguishes rows that are used less
// often than the clock hand comes round (which heat cannot).
float Store::Tiering::worth_of(std::uint32_t stripe, std::uint64_t suffix, RowRef row) const noexcept {
  const float uses = 1.0f + static_cast<float>(std::min(row.update_count(), kMostUpdates));
  return uses * uses / (1.0f + static_cast<float>(age_of(stripe, suffix, row)));
}

// Whether a row that came back was away for a short time only, so that it is kept at once.
bool Store::Tiering::is_back_soon(const Table& table, const Miss& miss, const RowImage& image) const noexcept {
  return static_cast<double>(updates_since(miss.stripe, miss.suffix, image.version)) < soon(table);
}

// Updates of a slot during which about as many rows come to memory as it has room for.
double Store::Tiering::soon(const Table& table) const noexcept {
  const double row_bytes = table.layout.data_bytes + RowLayout::kHeadBytes;
  const double rows = static_cast<double>(store_.options.memory_budget_bytes) / row_bytes;
  return kSoon * rows / static_cast<double>(store_.options.slot_count);
}

}  // namespace sparserow

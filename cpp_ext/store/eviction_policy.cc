// Which rows leave memory: first where they are coldest, then which of a stripe. See tiering.h.
#include <algorithm>

#include "store/tiering.h"
#include "util/random.h"

namespace sparserow {
namespace {

constexpr int kLooks = 64;         // at rows of a segment, to tell how warm they are
constexpr int kPasses = 6;         // of a clock hand over one stripe: the hottest row has cooled down after five
constexpr int kChoosyPasses = 2;   // of them; after that it takes any row without heat
constexpr std::uint64_t kFew = 8;  // one row of so many goes at a time, so that those left are worth more

}  // namespace

std::uint64_t Store::Tiering::next_random() noexcept { return mix_bits(++random_); }

// The coldest of some stripes of some tables where rows may leave; of tables that have a part of memory of their own,
// only where they are over it, or it is theirs that is wanted. own_only: of `wanting` alone.
Store::Tiering::Place Store::Tiering::coldest_place(const Table& wanting, bool own_only) {
  std::vector<std::shared_ptr<Table>> tables = store_.tables.all();
  std::erase_if(tables, [&](const std::shared_ptr<Table>& table) {
    if (own_only) return table.get() != &wanting;
    return table->schema.policy.ram_share > 0 && table.get() != &wanting && excess_of_share(*table, 0) == 0;
  });
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
      sum += meta.is_awaited() ? 1 : meta.heat();  // a hint is no use
      ++rows;
    });
  }
  return rows == 0 ? -1 : sum / rows;
}

// Appends `want` rows that no request needs in memory; fewer where there are not so many, or a few more. A clock hand
// goes over the stripe, a segment of its index at a time: it halves the heat of the rows that have some, and of the
// others it takes the few that are worth least.
void Store::Tiering::collect(Table& table, std::uint32_t stripe, std::uint64_t want, Eviction& out) {
  out.image.resize(table.codec.bytes());
  const std::shared_lock lock(store_.stripes[stripe].mutex);
  const TableStripe* stripe_rows = table.stripes[stripe].get();
  if (stripe_rows == nullptr) return;
  const std::uint64_t rows = stripe_rows->slab.rows();
  want = std::min(want, rows);
  std::uint64_t& clock_hand = table.clock_hands[stripe];
  std::unordered_set<std::uint64_t> taken;  // suffixes, since the clock hand may come round
  std::vector<Cold> cold;
  for (std::uint64_t passed = 0; taken.size() < want && passed < kPasses * rows;) {
    const RowIndex::Range range = stripe_rows->index.range_at(clock_hand);
    clock_hand = range.next;
    cold.clear();
    for (const RowIndex::Entry& entry : range.entries) {
      RowMeta meta = stripe_rows->slab.meta(entry.row);
      if (meta.is_pinned() || taken.contains(entry.suffix)) continue;
      if (meta.heat() > 0) {
        meta.cool();
        continue;
      }
      __builtin_prefetch(stripe_rows->slab.data(entry.row) + table.layout.data_bytes);
      cold.push_back({entry.suffix, entry.row, 0});
    }
    for (Cold& row : cold) row.worth = worth_of(stripe, row.suffix, stripe_rows->slab.at(row.row));
    // While it is choosy the same part goes of every segment, also where that is more than is wanted: if a segment were
    // passed for a row or two, rows would lose their heat faster than others leave.
    const bool is_choosy = passed < kChoosyPasses * rows;
    const std::uint64_t most =
        is_choosy ? range.entries.size() * std::max(rows / kFew, 2 * want) / rows + 1 : want - taken.size();
    const std::uint64_t count = std::min(most, std::uint64_t{cold.size()});
    std::nth_element(cold.begin(), cold.begin() + static_cast<std::ptrdiff_t>(count), cold.end(),
                     [](const Cold& left, const Cold& right) { return left.worth < right.worth; });
    for (std::size_t i = 0; i < count; ++i) {
      const RowRef row = stripe_rows->slab.at(cold[i].row);
      const RowMeta meta = stripe_rows->slab.meta(cold[i].row);
      const bool is_changed = meta.is_changed();
      const std::uint64_t key = key_of_hash(table.schema.id, store_.slots.hash(stripe, cold[i].suffix));
      taken.insert(cold[i].suffix);
      out.victims.push_back({key, cold[i].suffix, row.version(), static_cast<std::uint16_t>(stripe), is_changed});
      if (!is_changed) continue;
      table.codec.encode(key, row, out.image.data());
      out.batch.put(key_of(table, key), out.image, before_of(meta));
    }
    passed += range.entries.size();
  }
}

// How much a row is worth keeping: its updates, squared, by the updates of its slot since its last one. The count
// tells rows apart that are used less often than the clock hand comes round (which heat cannot), and what has gone out
// of use has less and less of it.
float Store::Tiering::worth_of(std::uint32_t stripe, std::uint64_t suffix, RowRef row) const noexcept {
  constexpr std::uint64_t kSequence = (std::uint64_t{1} << 48) - 1;
  const std::uint64_t now = store_.stripes[stripe].sequences[store_.slots.slot_in_stripe(suffix)];
  const std::uint64_t then = row.version() & kSequence;
  const float uses = 1.0f + static_cast<float>(row.update_count());
  return uses * uses / (1.0f + static_cast<float>(now - std::min(now, then)));
}

}  // namespace sparserow

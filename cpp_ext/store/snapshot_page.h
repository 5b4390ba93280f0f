// A page of a snapshot: rows of one table in columns, as a save writes them to a file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/slot_range.h"
#include "store/table/slot_order.h"
#include "store/table/table.h"
#include "util/mapped_vector.h"

namespace sparserow {

// Rows of one table of slots from first_slot on, by slot and hash; or of some, images that came out of turn. Slots
// before end_slot have all come.
struct SnapshotPage {
  static constexpr std::size_t kHeadBytes = 20;  // of a row's key, version and update count

  std::vector<std::uint64_t> keys;           // (n)
  std::vector<std::uint64_t> versions;       // (n)
  std::vector<std::uint32_t> update_counts;  // (n)
  MappedVector<std::byte> weights;           // (n, dim) as stored
  MappedVector<float> state;                 // (n, state floats)
  std::vector<std::uint32_t> age_steps;      // (n) as StoredRows; empty where the policy does not ask for it
  std::vector<std::uint32_t> push_seconds;   // (n) likewise
  std::uint32_t first_slot = 0;
  std::uint32_t end_slot = 0;
};

// Fills a page of one table. Belongs to one thread; the table and the slots must outlive it.
class SnapshotPageWriter {
 public:
  // steps: of the table's clock at the cut. max_bytes: about so many bytes of rows will come. used: its memory is used
  // again.
  SnapshotPageWriter(const Table& table, const SlotOrder& slots, std::uint32_t steps, std::uint64_t max_bytes,
                     SnapshotPage used);

  // data: the weights, state and stamps of the row, as a slab has them.
  void put(std::uint32_t stripe, std::uint64_t suffix, std::uint64_t version, std::uint32_t update_count,
           const std::byte* data);
  void put(std::uint32_t stripe, const SlotRange& range) {
    for (const SlotRange::Row& row : range.rows()) {
      put(stripe, row.suffix, row.version, row.update_count, range.data(row));
    }
  }
  [[nodiscard]] std::uint64_t rows() const noexcept { return page_.keys.size(); }
  // The page of all rows that were put, of these slots. Called once.
  [[nodiscard]] SnapshotPage take(std::uint32_t first_slot, std::uint32_t end_slot);

 private:
  const Table& table_;
  const SlotOrder& slots_;
  const std::uint32_t steps_;
  SnapshotPage page_;
};

}  // namespace sparserow

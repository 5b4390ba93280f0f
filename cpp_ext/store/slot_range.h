// Rows of a range of suffixes of one slot of a table, read from both tiers.
//
// A slot is read range by range, each of no more rows than its reader wants, and than a few MiB; so a page costs what
// its rows do, however many the slot has, and no lock is held for long. Of a range those in memory are read first, then
// those on the SSD that were not among them. A row that leaves memory in between was seen; one that comes to memory in
// between is still on the SSD.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "store/store_impl.h"

namespace sparserow {

class SlotRange {
 public:
  struct Row {
    std::uint64_t suffix;
    std::uint64_t version;
    std::uint32_t update_count;
    std::size_t at;  // of its weights, state and stamps in data()
  };
  struct Wanted {
    std::uint64_t first_version = 0;  // only rows of versions in [first_version, last_version]
    std::uint64_t last_version = UINT64_MAX;
    std::uint64_t most_rows = UINT64_MAX;  // that the range has, wanted or not; >= 1
    bool with_data = true;
  };

  // Reads a range that begins at `from`, a suffix of the slot, in place of what this has. It may have no row although
  // the slot has more. kDataLoss when the SSD lost rows.
  Status read(const Store::Impl& store, Table& table, std::uint32_t slot, std::uint64_t from, const Wanted& wanted);
  void clear() noexcept {
    rows_.clear();
    data_.clear();
    end_ = 0;
  }

  // The first suffix beyond the range; 0: the slot has no more.
  [[nodiscard]] std::uint64_t end() const noexcept { return end_; }
  // By suffix.
  [[nodiscard]] const std::vector<Row>& rows() const noexcept { return rows_; }
  [[nodiscard]] const std::byte* data(const Row& row) const noexcept { return data_.data() + row.at; }

  // ---- for a reader that knows more of the range

  // Behind the others; sort() brings them into order again.
  void add(std::uint64_t suffix, std::uint64_t version, std::uint32_t update_count, const std::byte* data,
           std::size_t bytes) {
    rows_.push_back({suffix, version, update_count, data_.size()});
    data_.insert(data_.end(), data, data + bytes);
  }
  void sort();
  // Puts another image, of the same size, in place of that of a row among the first `sorted`, which are in order; false
  // when it is not among them.
  bool replace(std::size_t sorted, std::uint64_t suffix, std::uint64_t version, std::uint32_t update_count,
               const std::byte* data, std::size_t bytes);

 private:
  std::uint64_t read_memory(const Store::Impl& store, const Table& table, std::uint32_t slot, std::uint64_t from,
                            const Wanted& wanted, std::uint64_t most_rows);

  std::vector<Row> rows_;
  std::vector<std::byte> data_;
  std::uint64_t end_ = 0;
  bool may_be_on_ssd_ = false;
  std::vector<RowIndex::Entry> entries_;  // of one segment of the index; kept, so that no memory is asked for under a
                                          // lock again
  std::vector<std::uint64_t> visited_;    // suffixes, of a table that has an SSD
};

}  // namespace sparserow

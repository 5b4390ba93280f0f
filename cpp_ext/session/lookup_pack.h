// The rows of several lookups and the position of each id among them, in one run of bytes that a device can be sent.
//
//   pack = (rows of run 0, rows of run 1, ... positions of run 0, positions of run 1, ... layout, order of run 0, ...)
//   rows       (unique keys, dim) float32; those of fresh() are unspecified
//   positions  (ids) int32, below the number of unique keys of the run; lookups one after another without gaps
//   layout     (kLayout, lookups) int32: the first id of each lookup among those of its run, its number of ids, and the
//              position of its table's padding id, -1 where no lookup of the table has that id
//   order      (unique keys + 1) int32, then (ids) int32, where order_ids() asks for it: the ids of each row,
//   ascending:
//              those of row r are ids[begins[r]:begins[r + 1]]
//   Each of these begins at a multiple of kAlign bytes.
//
// A group holds the unique rows of one table, and a run the groups of one width, one after another: the device does for
// a run at once what it would do for each table. It sums gradients by position, so what comes back is one sum for each
// unique key: a run's sums are (unique keys, dim) float32, runs one after another without gaps.
//
// Not thread-safe. Lookups keep the rows that they were given readable, so a pack may be written later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "session/binding.h"
#include "session/lookup.h"
#include "session/read_together.h"
#include "util/status.h"

namespace sparserow {

class LookupPack {
 public:
  static constexpr std::size_t kAlign = 64;
  static constexpr std::size_t kLayout = 3;
  static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  // Writes numbers, each with `by` added, without gaps.
  static void write_shifted(std::span<const std::int32_t> numbers, std::size_t by, std::byte* to);

  struct Group {
    std::shared_ptr<Binding> binding;
    std::vector<std::uint64_t> keys;     // (u) unique, in the order in which the lookups met them
    std::vector<std::uint32_t> indexes;  // (u): the row of each in the Lookup
    Lookup rows;                         // whose rows these are
    std::size_t run = 0;
    std::size_t first = 0;      // the group's first row among those of its run
    std::int64_t padding = -1;  // the id that lookups of the table leave out; -1: none
  };
  struct Run {
    std::uint32_t dim = 0;
    std::vector<std::size_t> groups;
    std::size_t rows = 0;   // unique keys of all groups
    std::size_t ids = 0;    // of all lookups
    std::size_t begin = 0;  // the first byte of the rows in the pack
    std::size_t order = 0;  // the first byte of the order; 0: there is none
  };
  struct Part {
    std::size_t group = 0;
    std::vector<std::int32_t> positions;  // (n) in the group
    std::size_t begin = 0;                // the first byte of the positions in the pack
    std::size_t first = 0;                // the first id among those of its run
  };
  // Rows of a group that changed after the pack was written.
  struct Fresh {
    std::size_t group = 0;
    std::vector<std::int32_t> places;  // (m), below the group's unique keys
    std::vector<float> rows;           // (m, dim)
  };

  // Looks the ids up together (look_up_together) and packs what was found, in order.
  static Result<std::unique_ptr<LookupPack>> look_up(std::span<const BoundIds> wanted, bool train);

  // Adds a lookup of these ids. Lookups of one binding that read the same rows share a group.
  void add(const std::shared_ptr<Binding>& binding, std::span<const std::int64_t> ids, const Lookup& lookup);

  [[nodiscard]] const std::vector<Group>& groups() const noexcept { return groups_; }
  [[nodiscard]] const std::vector<Run>& runs() const noexcept { return runs_; }
  [[nodiscard]] const std::vector<Part>& parts() const noexcept { return parts_; }
  [[nodiscard]] std::vector<Fresh>& fresh() noexcept { return fresh_; }
  [[nodiscard]] std::vector<Group>& mutable_groups() noexcept { return groups_; }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }
  [[nodiscard]] std::size_t layout_begin() const noexcept { return layout_begin_; }
  [[nodiscard]] std::size_t floats_of_sums() const noexcept;

  // Has write() say which ids each row has. Call after the last add(), before bytes().
  void order_ids();
  // to: bytes() bytes. Call after the last add(). The Lookups' rows are given back.
  void write(std::byte* to);
  // The part of a binding whose ids are these; nullopt when there is none. Every id is compared.
  [[nodiscard]] std::optional<std::size_t> find(const Binding& binding, std::span<const std::int64_t> ids) const;
  // The position of a key in a part's run; -1 when no lookup of the part's table has it.
  [[nodiscard]] std::int32_t position_of(std::size_t part, std::int64_t id) const noexcept;

  // What a part adds to the step: the sums of its positions but that of padding_idx.
  struct StagedPart {
    std::size_t part = 0;
    std::int64_t padding_idx = -1;
  };
  // Adds the sums to the steps of the bindings. sums: (floats_of_sums()). Only rows of staged parts are read. The
  // memory stays valid until the step has ended, and may be changed by it (Binding::stage_sums).
  Status stage(std::span<const StagedPart> staged, std::span<float> sums) const;

 private:
  [[nodiscard]] bool has_all_parts(std::size_t group, std::span<const StagedPart> staged) const;

  std::vector<Group> groups_;
  std::vector<Run> runs_;
  std::vector<Part> parts_;
  std::vector<Fresh> fresh_;
  std::vector<std::vector<std::uint32_t>> places_;  // by group: the place of each row of the Lookup, plus 1
  std::size_t bytes_ = 0;
  std::size_t layout_begin_ = 0;  // the first byte
  bool has_order_ = false;

  void lay_out();
  void write_layout(std::byte* to) const;
  void write_order(std::size_t run, std::byte* to) const;
  // The position of a key in a group; -1 when the group does not have it.
  static std::int32_t position_in(const Group& group, std::int64_t id) noexcept;
};

}  // namespace sparserow

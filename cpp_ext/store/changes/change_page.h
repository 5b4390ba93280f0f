// Changes on their way from a store to one that follows it: pages of slots, weights only. Version 5:
//
//   page  = magic u32 "SPCP" | format u16 | 0 u16 | slots u32 | tables u32 | parts u32 | 0 u32 | checksum u64 | table*
//   |
//           slot* | part*
//   table = table_id u32 | schema_version u32 | dim u32 | dtype u8 | replaces u8 | 0 u8[2] | n u32 | erased u32 |
//           keys u64[n] | versions u64[n] | erased keys u64[erased] | erased versions u64[erased] | rows[n], padded to
//           8
//   slot  = slot u32 | kind u8 | 0 u8[3] | oldest_at_ms u32 | 0 u32 | since u64 | until u64 | position u64
//   part  = slot u32 | 0 u32 | from_table u32 | to_table u32 | from_suffix u64 | to_suffix u64 | number u64
//
// A table's rows are those of all slots of the page together, so that either side reads and writes them in one go (one
// slot has a row or two of a table: 2 us a row by slot, 0.2 us by table). Slots that are sent whole have their rows in
// tables of their own, which replace. A page with such slots has one of these for each table that the cursor wants and
// the store has, also where it has no rows. So a follower distinguishes a table that was dropped, whose rows it keeps,
// from one whose rows are gone.
//
// A slot that a page has no room for comes in parts (change_log.h), and is the last of its page until its own last
// part, whose number is 0. The follower acknowledges the number of any other part, and the slot with the last. A part
// of a slot that is sent whole replaces what the follower has of [from, to), in the order of (table, suffix).
//
// `until` is the version up to which the follower has everything then, `position` what it acknowledges; they differ
// where rows are held back (send_threshold.h). Little-endian. The checksum is XXH3-64 of all that follows it. Rows are
// in the dtype of the store that they come from, without conversion. A reader checks lengths before it uses the bytes
// that they cover.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/changes/change_log.h"
#include "store/store.h"

namespace sparserow {

struct ChangePage {
  std::vector<std::byte> bytes;
  std::uint32_t slots = 0;       // 0: the cursor has everything, but for what is held back
  std::uint32_t next_begin = 0;  // where the next page begins to look
  bool is_last = false;          // nothing is left behind it: next_begin is 0
};

// What a cursor has not got, from `begin` on (next_begin of a page, or 0), or else from the first slot on: at most
// max_bytes, but at least one row. So pages from `begin` 0 to one that is_last, each part of a slot acknowledged before
// the next page is read, have everything of the moment when the first one was read. Does not move the cursor. NotFound:
// the cursor is not open.
Result<ChangePage> read_changes(Store& store, const std::string& cursor, std::uint32_t begin, std::uint64_t max_bytes);

struct AppliedSlot {
  std::uint32_t slot = 0;
  std::uint64_t version = 0;       // up to which the follower has everything now
  std::uint64_t position = 0;      // to be acknowledged
  std::uint32_t oldest_at_ms = 0;  // as in SlotChanges
};
struct AppliedPage {
  std::vector<AppliedSlot> slots;  // but one whose last part is still to come
  std::uint64_t part = 0;          // number of the part of that slot, to be acknowledged; 0: there is none
  std::uint64_t rows = 0;          // that were newer than what the store had
  std::uint64_t unchanged = 0;     // that were not
  std::uint64_t erased = 0;
  bool has_whole_slots = false;               // then those are named by `tables`
  std::vector<std::uint32_t> tables;          // that the sender has, of those that the cursor wants; ascending
  std::vector<std::uint32_t> applied_tables;  // of which the page has something; ascending
  struct Other {
    std::uint32_t table_id;
    std::uint32_t schema_version;
    std::uint32_t dim;
  };
  std::vector<Other> others;  // that the sender has with another dim or schema version: nothing of them was changed
};

// Makes `store`'s slots as the page says: newest wins in a delta, a snapshot replaces, but for rows of tables that the
// sender does not have (any more), which stay, and so do those of tables that it has with another dim or schema
// version. Tables that the store does not have are passed over. Only one thread may change the rows of a slot
// meanwhile. DataLoss: the page is damaged, nothing was changed.
Result<AppliedPage> apply_changes(Store& store, std::span<const std::byte> page);

}  // namespace sparserow

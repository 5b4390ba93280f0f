// The tables of a store by id, and how many cursors follow each. Thread-safe; its lock comes before a stripe's.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <span>
#include <vector>

#include "schema/schema.h"
#include "store/table/table.h"
#include "util/fair_mutex.h"
#include "util/status.h"

namespace sparserow {

class TableMap {
 public:
  [[nodiscard]] std::shared_ptr<Table> find(std::uint32_t table_id) const;  // null: there is none
  [[nodiscard]] std::vector<std::shared_ptr<Table>> all() const;            // by id
  // Those of the ids that exist, in the ids' order.
  [[nodiscard]] std::vector<std::shared_ptr<Table>> named(std::span<const std::uint32_t> ids) const;

  // Adds the table that `make` gives. A table of the id that is there already must have the same schema
  // (kFailedPrecondition). `is_tiered`: the store has an SSD, which a share of memory needs (kFailedPrecondition); the
  // shares of all tables must fit together (kInvalidArgument). True: it was added, and may have been removed before.
  Result<bool> add(const TableSchema& schema, bool is_tiered, const std::function<std::shared_ptr<Table>()>& make);
  // The table, which is in the map no more; null: there was none.
  std::shared_ptr<Table> remove(std::uint32_t table_id);

  // Whether a cursor wants the table, which need not be there.
  [[nodiscard]] bool has_followers(std::uint32_t table_id) const;
  // Counts a cursor that wants these tables (ids; empty: all). True when one of them was not followed before.
  bool follow(const std::vector<std::uint32_t>& wanted);
  // Counts such a cursor less.
  void unfollow(const std::vector<std::uint32_t>& wanted);

 private:
  [[nodiscard]] Status check_share(const TableSchema& schema, bool is_tiered) const;
  // Also for a table that is not there yet.
  [[nodiscard]] bool is_followed(std::uint32_t table_id) const;
  void mark_followed();

  mutable FairMutex mutex_;  // guards what follows
  std::map<std::uint32_t, std::shared_ptr<Table>> tables_;
  std::uint32_t last_removed_ = 0;  // the highest id; ids grow, so a new table has a higher one
  std::uint32_t cursors_of_all_ = 0;
  std::map<std::uint32_t, std::uint32_t> cursors_;  // that name the table, by its id
};

}  // namespace sparserow

// From a store to a page.
#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <utility>

#include "store/changes/change_page.h"
#include "store/changes/change_page_format.h"
#include "store/table/slot_order.h"
#include "util/hash.h"

namespace sparserow {
namespace {

template <class T>
void append(std::vector<std::byte>& out, const T* values, std::size_t count) {
  const auto bytes = std::as_bytes(std::span(values, count));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

// Writes values at `to` and moves it behind them.
template <class T>
void put(std::byte*& to, const T* values, std::size_t count) {
  if (count > 0) std::memcpy(to, values, count * sizeof(T));
  to += count * sizeof(T);
}

// Gathers the changes of slots by table, then writes them.
class PageWriter {
 public:
  PageWriter(Store& store, const std::string& cursor, const ChangeLog::Behind& behind, std::uint64_t max_bytes)
      : store_(store), log_(store.changes()), cursor_(cursor), behind_(behind), max_bytes_(max_bytes) {}

  // Takes slots of a stripe, one after the other, while the page has room; returns how many it has to their end.
  Result<std::size_t> add(StripeChanges stripe) {
    if (stripe.may_repeat || behind_.threshold != nullptr) join(stripe);
    std::vector<std::uint64_t> bytes_of_slot(stripe.slots.size());
    std::vector<std::uint8_t> is_whole_here(stripe.slots.size());
    each_row(stripe,
             [&](const StripeChanges::Row& row, TableBatch& table) { bytes_of_slot[row.slot] += table.bytes_of_row; });
    std::size_t done = 0;
    for (; done < stripe.slots.size(); ++done) {
      SlotChanges& changes = stripe.slots[done];
      for (const ErasedRow& row : changes.erased) batch(row.table_id, is_whole(changes));  // takes room
      const std::uint64_t bytes = bytes_of_slot[done] + changes.erased.size() * kErasedBytes + kSlotBytes;
      if (changes.is_noted && changes.from == SlotPlace() && bytes <= room() && behind_.threshold == nullptr) {
        bytes_ += bytes_of_slot[done];
        is_whole_here[done] = 1;
        add(std::move(changes));
        continue;
      }
      // What fits into a page of its own waits for that.
      if (!slots_.empty() && changes.is_noted && bytes > room() && bytes <= max_bytes_) break;
      const auto taken = fit(changes, stripe, static_cast<std::uint32_t>(done));
      SR_RETURN_IF_ERROR(taken.status());
      if (!taken.value()) break;
      if (!changes.is_noted) log_.count_look(changes);
      const bool has_more = changes.to.has_value();
      add(std::move(changes));
      if (has_more) break;
    }
    each_row(stripe, [&](const StripeChanges::Row& row, TableBatch& table) {
      if (is_whole_here[row.slot] != 0) table.keys.push_back(row.key);
    });
    return done;
  }

  // Writes the page. Slots of which nothing goes are left out of it and named in `passed`.
  Status finish(ChangePage& page, std::vector<SlotChanges>& passed) {
    if (std::ranges::any_of(slots_, is_whole)) {
      for (const std::uint32_t id : behind_.tables.empty() ? store_.table_ids() : behind_.tables) batch(id, true);
    }
    page.bytes.reserve(bytes_);
    page.bytes.resize(sizeof(PageHead));
    PageHead head;
    std::vector<PagePart> parts;
    for (auto& [name, table] : batches_) {
      if (table.schema) SR_RETURN_IF_ERROR(write_table(table, name.second, page.bytes, head.tables));
    }
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      SlotChanges& changes = slots_[i];
      PageSlot slot{.slot = changes.slot,
                    .kind = static_cast<std::uint8_t>(changes.kind),
                    .zero = {},
                    .oldest_at_ms = changes.oldest_at_ms,
                    .zero2 = 0,
                    .since = changes.since,
                    .until = changes.until,
                    .position = changes.until};
      if (behind_.threshold != nullptr) {
        const SendThreshold::PassEnd pass = behind_.threshold->end(changes, is_sent_[i] != 0);
        slot.until = pass.safe;
        slot.oldest_at_ms = pass.oldest_at_ms;
      }
      if (is_sent_[i] == 0) {
        passed.push_back(std::move(changes));
        continue;
      }
      append(page.bytes, &slot, 1);
      ++head.slots;
      if (changes.from == SlotPlace() && !changes.to) continue;
      const auto number = changes.to ? log_.sent(cursor_, changes) : Result<std::uint64_t>(0);
      SR_RETURN_IF_ERROR(number.status());
      const SlotPlace to = changes.to.value_or(kSlotEnd);
      parts.push_back({.slot = changes.slot,
                       .from_table = changes.from.table_id,
                       .to_table = to.table_id,
                       .from_suffix = changes.from.suffix,
                       .to_suffix = to.suffix,
                       .number = number.value()});
    }
    append(page.bytes, parts.data(), parts.size());
    head.parts = static_cast<std::uint32_t>(parts.size());
    page.slots = head.slots;
    head.checksum = XXH3_64bits(page.bytes.data() + sizeof head, page.bytes.size() - sizeof head);
    std::memcpy(page.bytes.data(), &head, sizeof head);
    return Status::ok();
  }

 private:
  struct Part {
    std::uint32_t slot;      // in slots_
    std::size_t begin, end;  // in its written rows
  };
  struct TableBatch {
    std::optional<TableSchema> schema;  // none: dropped since, which the next read of a slot says
    std::uint64_t bytes_of_row = 0;     // with key and version
    std::vector<std::uint64_t> keys, erased, erased_versions;
    std::vector<Part> parts;  // of the keys, where rows may be held back
  };

  static constexpr std::uint64_t kErasedBytes = 2 * sizeof(std::uint64_t);
  static constexpr std::uint64_t kSlotBytes = sizeof(PageSlot) + sizeof(PagePart);

  static bool is_whole(const SlotChanges& changes) noexcept { return changes.kind == SlotChanges::Kind::kSnapshot; }
  [[nodiscard]] std::uint64_t room() const noexcept { return max_bytes_ - std::min(bytes_, max_bytes_); }

  // Calls visit(row, batch) for the rows of a stripe whose tables there are.
  template <class Visit>
  void each_row(const StripeChanges& stripe, Visit&& visit) {
    std::uint32_t last_table = 0;
    TableBatch* table = nullptr;
    for (const StripeChanges::Row& row : stripe.written) {
      if (table == nullptr || row.table_id != last_table) table = batch(last_table = row.table_id, false);
      if (table != nullptr) visit(row, *table);
    }
  }

  // Rows that are noted more than once become one. What holds rows back has them slot by slot.
  void join(StripeChanges& stripe) const {
    auto& rows = stripe.written;
    if (behind_.threshold == nullptr) {
      const auto name = [](const StripeChanges::Row& row) { return std::pair(row.table_id, row.key); };
      std::ranges::sort(rows, {}, name);
      const auto repeated = std::ranges::unique(rows, {}, name);
      rows.erase(repeated.begin(), repeated.end());
      return;
    }
    for (const StripeChanges::Row& row : std::exchange(rows, {})) {
      stripe.slots[row.slot].written.push_back({row.key, row.table_id, 1});
    }
    for (SlotChanges& changes : stripe.slots) join_rows(changes.written);
  }

  // Leaves of a slot what the page has room for, from where it begins, and sets where the rest does: a tombstone or a
  // row at least. False when the page has others and no room for one.
  Result<bool> fit(SlotChanges& changes, const StripeChanges& stripe, std::uint32_t number) {
    const bool is_first = slots_.empty();
    if (is_whole(changes) && !std::exchange(names_tables_, true)) {
      bytes_ += (behind_.tables.empty() ? store_.table_ids() : behind_.tables).size() * sizeof(PageTable);
    }
    if (room() < kSlotBytes && !is_first) return false;
    std::uint64_t left = room() - std::min(room(), kSlotBytes);
    const std::uint64_t most_erased = std::max<std::uint64_t>(left / kErasedBytes, is_first ? 1 : 0);
    if (changes.erased.size() > most_erased) {
      if (most_erased == 0) return false;
      changes.erased.resize(most_erased);
      changes.to = SlotPlace{.erased_after = changes.erased.back().version & kSequence};
      if (behind_.threshold != nullptr) behind_.threshold->begin(changes);
      changes.written.clear();
      return true;
    }
    left -= std::min(left, changes.erased.size() * kErasedBytes);
    const std::uint64_t used = bytes_;  // and what tables take that come to the page
    if (!changes.is_noted) {
      SR_RETURN_IF_ERROR(log_.find_rows(changes, behind_.tables, left));
    } else if (behind_.threshold == nullptr) {
      for (const StripeChanges::Row& row : stripe.written) {
        if (row.slot == number) changes.written.push_back({row.key, row.table_id, 1});
      }
    }
    if (behind_.threshold != nullptr) behind_.threshold->begin(changes);
    if (changes.is_noted || behind_.threshold != nullptr) keep_range(changes, left);
    std::uint64_t bytes = 0;
    std::size_t kept = 0;
    for (; kept < changes.written.size(); ++kept) {
      const TableBatch* table = batch(changes.written[kept].table_id, is_whole(changes));
      bytes += table == nullptr ? 0 : table->bytes_of_row;
      if (bytes + bytes_ - used > left && (kept > 0 || !changes.erased.empty() || !is_first)) break;
    }
    if (kept == changes.written.size()) return true;
    if (kept == 0 && changes.erased.empty()) return false;
    changes.to = place_of(changes, changes.written[kept]);
    changes.written.resize(kept);
    return true;
  }

  // Leaves the rows of [from, to), in order, and no more than could have room.
  void keep_range(SlotChanges& changes, std::uint64_t room) {
    std::vector<ChangedRow>& rows = changes.written;
    const auto from = changes.from.row(), to = changes.to.value_or(kSlotEnd).row();
    std::erase_if(rows, [&](const ChangedRow& row) { return path_of(row) < from || path_of(row) >= to; });
    std::uint64_t least_bytes = room + 1;
    for (const ChangedRow& row : rows) {
      if (const TableBatch* table = batch(row.table_id, is_whole(changes)); table != nullptr)
        least_bytes = std::min(least_bytes, table->bytes_of_row);
    }
    if (const std::size_t most = 1 + room / least_bytes; rows.size() > most) {  // else each part would sort them all
      const auto beyond = rows.begin() + static_cast<std::ptrdiff_t>(most);
      std::ranges::nth_element(rows, beyond, {}, [this](const ChangedRow& row) { return path_of(row); });
      changes.to = place_of(changes, *beyond);
      rows.erase(beyond, rows.end());
    }
    join_rows(rows);
  }

  [[nodiscard]] SlotPlace place_of(const SlotChanges& changes, const ChangedRow& row) const noexcept {
    const auto [table_id, suffix] = path_of(row);
    return {changes.until & kSequence, table_id, suffix};
  }
  [[nodiscard]] std::pair<std::uint32_t, std::uint64_t> path_of(const ChangedRow& row) const noexcept {
    return {row.table_id, slots_order_.suffix(row_hash(row.table_id, row.key))};
  }

  void add(SlotChanges changes) {
    const auto slot = static_cast<std::uint32_t>(slots_.size());
    const bool replaces = is_whole(changes);
    std::size_t at = 0;
    while (at < changes.written.size()) {
      const std::uint32_t id = changes.written[at].table_id;
      const std::size_t begin = at;
      while (at < changes.written.size() && changes.written[at].table_id == id) ++at;
      TableBatch* table = batch(id, replaces);
      if (table == nullptr) continue;
      for (std::size_t i = begin; i < at; ++i) table->keys.push_back(changes.written[i].key);
      if (behind_.threshold != nullptr) table->parts.push_back({slot, begin, at});
      bytes_ += (at - begin) * table->bytes_of_row;
    }
    for (const ErasedRow& row : changes.erased) {
      TableBatch* table = batch(row.table_id, replaces);
      if (table == nullptr) continue;
      table->erased.push_back(row.key);
      table->erased_versions.push_back(row.version);
      bytes_ += kErasedBytes;
    }
    bytes_ += kSlotBytes;
    // Erasures and whole slots are always sent; with a hold, rows may all wait.
    is_sent_.push_back(behind_.threshold == nullptr || replaces || !changes.erased.empty() ? 1 : 0);
    slots_.push_back(std::move(changes));
  }

  TableBatch* batch(std::uint32_t table_id, bool replaces) {
    const auto [at, is_new] = batches_.try_emplace({table_id, replaces});
    if (is_new) {
      at->second.schema = store_.schema(table_id);
      if (const auto& schema = at->second.schema) {
        at->second.bytes_of_row = bytes_of_changed_row(*schema);
        bytes_ += sizeof(PageTable) + sizeof(std::uint64_t);
      }
    }
    return at->second.schema ? &at->second : nullptr;
  }

  // The rows that a table's keys have now; those that went meanwhile are left out, and come as tombstones later.
  Status write_table(TableBatch& table, bool replaces, std::vector<std::byte>& out, std::uint32_t& tables) {
    const TableSchema& schema = *table.schema;
    const std::size_t bytes_of_row = row_bytes(schema.dtype, schema.dim);
    const std::size_t n = table.keys.size();
    const std::size_t begin = out.size();
    const std::size_t before_rows = sizeof(PageTable) + (2 * n + 2 * table.erased.size()) * sizeof(std::uint64_t);
    out.resize(begin + before_rows + n * bytes_of_row);
    std::byte* const rows = out.data() + begin + before_rows;
    std::vector<std::uint64_t> versions(n);
    std::vector<std::uint8_t> goes(n);
    const Status pulled = store_.pull(schema.id, table.keys, schema.dtype, rows, {.versions = versions, .found = goes});
    const bool is_dropped = pulled.code() == Code::kNotFound;
    if (is_dropped) table.erased.clear();
    if (!is_dropped) SR_RETURN_IF_ERROR(pulled);
    if (behind_.threshold != nullptr) choose(table, {rows, n * bytes_of_row}, goes);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < n; ++i) {
      if (goes[i] == 0) continue;
      if (kept != i) {
        table.keys[kept] = table.keys[i];
        versions[kept] = versions[i];
        std::memmove(rows + kept * bytes_of_row, rows + i * bytes_of_row, bytes_of_row);
      }
      ++kept;
    }
    if (kept == 0 && table.erased.empty() && (is_dropped || !replaces)) {
      out.resize(begin);
      return Status::ok();
    }
    const PageTable head{.table_id = schema.id,
                         .schema_version = schema.version,
                         .dim = schema.dim,
                         .dtype = static_cast<std::uint8_t>(schema.dtype),
                         .replaces = static_cast<std::uint8_t>(replaces),
                         .zero = {},
                         .n = static_cast<std::uint32_t>(kept),
                         .erased = static_cast<std::uint32_t>(table.erased.size())};
    std::byte* to = out.data() + begin;
    put(to, &head, 1);
    put(to, table.keys.data(), kept);
    put(to, versions.data(), kept);
    put(to, table.erased.data(), table.erased.size());
    put(to, table.erased_versions.data(), table.erased.size());
    std::memmove(to, rows, kept * bytes_of_row);
    const std::size_t end = static_cast<std::size_t>(to - out.data()) + kept * bytes_of_row;
    out.resize(end);
    out.resize(padded(end));
    ++tables;
    return Status::ok();
  }

  // Asks what holds rows back, slot by slot.
  void choose(const TableBatch& table, std::span<const std::byte> rows, std::vector<std::uint8_t>& goes) {
    const TableSchema& schema = *table.schema;
    const std::size_t bytes_of_row = row_bytes(schema.dtype, schema.dim);
    std::vector<float> floats;
    std::size_t at = 0;
    for (const Part& part : table.parts) {
      const std::size_t n = part.end - part.begin;
      floats.resize(n * schema.dim);
      for (std::size_t i = 0; i < n; ++i) {
        convert_to_float(schema.dtype, rows.data() + (at + i) * bytes_of_row, floats.data() + i * schema.dim,
                         schema.dim);
      }
      const SlotChanges& changes = slots_[part.slot];
      const auto chosen = behind_.threshold->choose(changes, std::span(changes.written).subspan(part.begin, n),
                                                    schema.dim, floats, std::span(goes).subspan(at, n));
      for (std::size_t i = 0; i < n; ++i) {
        goes[at + i] = chosen[i];
        is_sent_[part.slot] |= chosen[i];
      }
      at += n;
    }
  }

  const Store& store_;
  ChangeLog& log_;
  const std::string& cursor_;
  const ChangeLog::Behind& behind_;
  const std::uint64_t max_bytes_;
  const SlotOrder slots_order_{store_.options().slot_count};
  std::vector<SlotChanges> slots_;
  std::vector<std::uint8_t> is_sent_;  // of each
  std::map<std::pair<std::uint32_t, bool>, TableBatch> batches_;
  bool names_tables_ = false;  // that the store has, for slots that are sent whole
  std::uint64_t bytes_ = sizeof(PageHead);
};

// One page of slots from `begin` on; with rows held back it may have none.
Result<ChangePage> read_page(Store& store, const std::string& cursor, std::uint32_t begin, std::uint64_t max_bytes) {
  ChangeLog& log = store.changes();
  const auto behind = log.behind(cursor, begin);
  SR_RETURN_IF_ERROR(behind.status());
  PageWriter writer(store, cursor, behind.value(), max_bytes);
  const std::span<const ChangeLog::Behind::Slot> slots(behind.value().slots);
  const std::uint32_t stripes = SlotOrder(store.options().slot_count).stripe_count();
  std::size_t looked_at = 0;
  for (std::size_t end = 0; end < slots.size() && looked_at == end;) {
    const std::uint32_t stripe = slots[looked_at].slot % stripes;
    while (end < slots.size() && slots[end].slot % stripes == stripe) ++end;
    auto changes = log.read(behind.value(), slots.subspan(looked_at, end - looked_at));
    SR_RETURN_IF_ERROR(changes.status());
    const auto taken = writer.add(std::move(changes).value());
    SR_RETURN_IF_ERROR(taken.status());
    looked_at += taken.value();
  }
  ChangePage page;
  page.is_last = looked_at == slots.size();
  page.next_begin = page.is_last ? 0 : log.begin_of(slots[looked_at].slot);
  std::vector<SlotChanges> passed;
  SR_RETURN_IF_ERROR(writer.finish(page, passed));
  if (!passed.empty()) SR_RETURN_IF_ERROR(log.passed(cursor, passed));
  return page;
}

}  // namespace

Result<ChangePage> read_changes(Store& store, const std::string& cursor, std::uint32_t begin, std::uint64_t max_bytes) {
  for (bool is_from_start = begin == 0;;) {
    auto page = read_page(store, cursor, begin, max_bytes);
    if (!page.is_ok() || page.value().slots > 0 || (page.value().is_last && is_from_start)) return page;
    is_from_start |= page.value().is_last;
    begin = page.value().next_begin;
  }
}

}  // namespace sparserow

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
  PageWriter(const Store& store, const ChangeLog::Behind& behind)
      : store_(store), tables_(behind.tables), threshold_(behind.threshold) {}

  // Takes slots of a stripe, one after the other, until the page has about max_bytes; returns how many.
  Result<std::size_t> add(ChangeLog& log, const ChangeLog::Behind& behind, StripeChanges stripe,
                          std::uint64_t max_bytes) {
    if (stripe.may_repeat || threshold_ != nullptr) join(stripe);
    std::vector<std::uint64_t> bytes_of_slot(stripe.slots.size());
    std::uint32_t last_table = 0;
    TableBatch* table = nullptr;
    for (const StripeChanges::Row& row : stripe.written) {
      if (table == nullptr || row.table_id != last_table) table = batch(last_table = row.table_id, false);
      bytes_of_slot[row.slot] += table == nullptr ? 0 : table->bytes_of_row;
    }
    std::size_t taken = 0;
    for (SlotChanges& changes : stripe.slots) {
      if (!slots_.empty() && bytes_ >= max_bytes) break;
      bytes_ += bytes_of_slot[taken] + sizeof(PageSlot);
      if (!changes.is_counted) SR_RETURN_IF_ERROR(log.find_rows(behind, changes));
      add(std::move(changes));
      ++taken;
    }
    if (threshold_ != nullptr) return taken;
    table = nullptr;
    for (const StripeChanges::Row& row : stripe.written) {
      if (row.slot >= taken) continue;
      if (table == nullptr || row.table_id != last_table) table = batch(last_table = row.table_id, false);
      if (table != nullptr) table->keys.push_back(row.key);
    }
    return taken;
  }

  // Writes the page. Slots of which nothing goes are left out of it and named in `passed`.
  Status finish(ChangePage& page, std::vector<SlotChanges>& passed) {
    if (std::ranges::any_of(slots_, is_whole)) {
      for (const std::uint32_t id : tables_.empty() ? store_.table_ids() : tables_) batch(id, true);
    }
    page.bytes.reserve(bytes_ + sizeof(PageHead) + batches_.size() * (sizeof(PageTable) + sizeof(std::uint64_t)));
    page.bytes.resize(sizeof(PageHead));
    PageHead head;
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
      if (threshold_ != nullptr) {
        const SendThreshold::PassEnd pass = threshold_->end(changes, is_sent_[i] != 0);
        slot.until = pass.safe;
        slot.oldest_at_ms = pass.oldest_at_ms;
      }
      if (is_sent_[i] == 0) {
        passed.push_back(std::move(changes));
        continue;
      }
      append(page.bytes, &slot, 1);
      ++head.slots;
    }
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

  static bool is_whole(const SlotChanges& changes) noexcept { return changes.kind == SlotChanges::Kind::kSnapshot; }

  // Rows that are noted more than once become one. What holds rows back has them slot by slot.
  void join(StripeChanges& stripe) const {
    auto& rows = stripe.written;
    if (threshold_ == nullptr) {
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

  void add(SlotChanges changes) {
    if (threshold_ != nullptr) threshold_->begin(changes);
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
      if (threshold_ != nullptr) table->parts.push_back({slot, begin, at});
      bytes_ += (at - begin) * table->bytes_of_row;
    }
    for (const ErasedRow& row : changes.erased) {
      TableBatch* table = batch(row.table_id, replaces);
      if (table == nullptr) continue;
      table->erased.push_back(row.key);
      table->erased_versions.push_back(row.version);
      bytes_ += 2 * sizeof(std::uint64_t);
    }
    // Erasures and whole slots are always sent; with a hold, rows may all wait.
    is_sent_.push_back(threshold_ == nullptr || replaces || !changes.erased.empty() ? 1 : 0);
    slots_.push_back(std::move(changes));
  }

  TableBatch* batch(std::uint32_t table_id, bool replaces) {
    const auto [at, is_new] = batches_.try_emplace({table_id, replaces});
    if (is_new) {
      at->second.schema = store_.schema(table_id);
      if (const auto& schema = at->second.schema) {
        at->second.bytes_of_row = row_bytes(schema->dtype, schema->dim) + 2 * sizeof(std::uint64_t);
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
    if (threshold_ != nullptr) choose(table, {rows, n * bytes_of_row}, goes);
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
      const auto chosen = threshold_->choose(changes, std::span(changes.written).subspan(part.begin, n), schema.dim,
                                             floats, std::span(goes).subspan(at, n));
      for (std::size_t i = 0; i < n; ++i) {
        goes[at + i] = chosen[i];
        is_sent_[part.slot] |= chosen[i];
      }
      at += n;
    }
  }

  const Store& store_;
  const std::vector<std::uint32_t>& tables_;  // that the cursor wants; empty: all
  const std::shared_ptr<SendThreshold> threshold_;
  std::vector<SlotChanges> slots_;
  std::vector<std::uint8_t> is_sent_;  // of each
  std::map<std::pair<std::uint32_t, bool>, TableBatch> batches_;
  std::uint64_t bytes_ = 0;
};

// One page of slots from `begin` on; with rows held back it may have none.
Result<ChangePage> read_page(Store& store, const std::string& cursor, std::uint32_t begin, std::uint64_t max_bytes) {
  ChangeLog& log = store.changes();
  const auto behind = log.behind(cursor, begin);
  SR_RETURN_IF_ERROR(behind.status());
  PageWriter writer(store, behind.value());
  const std::span<const ChangeLog::Behind::Slot> slots(behind.value().slots);
  const std::uint32_t stripes = SlotOrder(store.options().slot_count).stripe_count();
  std::size_t looked_at = 0;
  for (std::size_t end = 0; end < slots.size() && looked_at == end;) {
    const std::uint32_t stripe = slots[looked_at].slot % stripes;
    while (end < slots.size() && slots[end].slot % stripes == stripe) ++end;
    auto changes = log.read(behind.value(), slots.subspan(looked_at, end - looked_at));
    SR_RETURN_IF_ERROR(changes.status());
    const auto taken = writer.add(log, behind.value(), std::move(changes).value(), max_bytes);
    SR_RETURN_IF_ERROR(taken.status());
    looked_at += taken.value();
  }
  ChangePage page;
  page.is_last = looked_at == slots.size();
  page.next_begin = page.is_last ? 0 : log.place_of(slots[looked_at].slot);
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

// From a page to a store that follows.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "store/changes/change_page.h"
#include "store/changes/change_page_format.h"
#include "store/store_writing.h"
#include "util/hash.h"
#include "util/not_allowed.h"

namespace sparserow {
namespace {

Status damaged(const std::string& what) { return {Code::kDataLoss, "page of changes: " + what}; }

// Reads a page from its front; every length is checked against what is left. What it gives lies in the page.
class PageReader {
 public:
  explicit PageReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  bool read(T& value) {
    if (rest_.size() < sizeof(T)) return false;
    std::memcpy(&value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
    return true;
  }
  template <class T>
  bool read(std::span<const T>& values, std::uint64_t count) {
    if (count > rest_.size() / sizeof(T)) return false;
    values = {reinterpret_cast<const T*>(rest_.data()), count};
    rest_ = rest_.subspan(count * sizeof(T));
    return true;
  }
  [[nodiscard]] bool is_empty() const noexcept { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

struct TableChanges {
  PageTable head;
  std::span<const std::uint64_t> keys, versions, erased, erased_versions;
  std::span<const std::byte> rows;
};
struct ParsedPage {
  std::vector<TableChanges> tables;
  std::vector<PageSlot> slots;
  std::unordered_map<std::uint32_t, PagePart> parts;  // by slot
};

bool read_table(PageReader& reader, TableChanges& table) {
  PageTable& head = table.head;
  if (!reader.read(head) || head.dim < 1 || head.dim > kMaxDim || !is_valid(static_cast<Dtype>(head.dtype)) ||
      head.replaces > 1) {
    return false;
  }
  const std::size_t bytes = row_bytes(static_cast<Dtype>(head.dtype), head.dim);
  return reader.read(table.keys, head.n) && reader.read(table.versions, head.n) &&
         reader.read(table.erased, head.erased) && reader.read(table.erased_versions, head.erased) &&
         reader.read(table.rows, padded(head.n * bytes));
}

// page: aligned to 8 bytes.
Result<ParsedPage> parse(std::span<const std::byte> page) {
  PageReader reader(page);
  PageHead head;
  if (!reader.read(head) || head.magic != kPageMagic || head.zero != 0 || head.zero2 != 0) return damaged("is none");
  const auto covered = page.subspan(sizeof head);
  if (XXH3_64bits(covered.data(), covered.size()) != head.checksum) return damaged("fails its checksum");
  if (head.format < kOldestPageFormat || head.format > kPageFormat) {
    return Status(Code::kFailedPrecondition, "the page of changes has format " + std::to_string(head.format) +
                                                 ", and this process reads formats " +
                                                 range_text(kOldestPageFormat, kPageFormat) +
                                                 "; followers are upgraded before the shards that they follow");
  }
  ParsedPage parsed;
  for (std::uint32_t i = 0; i < head.tables; ++i) {
    if (!read_table(reader, parsed.tables.emplace_back())) return damaged("ends within a table");
  }
  for (std::uint32_t i = 0; i < head.slots; ++i) {
    if (!reader.read(parsed.slots.emplace_back())) return damaged("ends within a slot");
  }
  for (std::uint32_t i = 0; i < head.parts; ++i) {
    PagePart part;
    if (!reader.read(part)) return damaged("ends within a part");
    parsed.parts.insert_or_assign(part.slot, part);
  }
  if (!reader.is_empty()) return damaged("has bytes after its last part");
  return parsed;
}

// Takes the tables out of a page that this store does not have, or has with another schema: their rows mean others.
void leave_others(const Store& store, ParsedPage& page, AppliedPage& applied) {
  std::erase_if(page.tables, [&](const TableChanges& table) {
    const PageTable& head = table.head;
    const auto schema = store.schema(head.table_id);
    if (!schema) return true;
    if (schema->dim == head.dim && schema->version == head.schema_version) {
      applied.applied_tables.push_back(head.table_id);
      return false;
    }
    applied.others.push_back({head.table_id, head.schema_version, head.dim});
    return true;
  });
  std::ranges::sort(applied.applied_tables);
}

Status erase_older(Store& store, const TableChanges& table, AppliedPage& applied) {
  const std::size_t n = table.erased.size();
  std::vector<std::byte> rows(n * row_bytes(Dtype::kFloat32, table.head.dim));
  std::vector<std::uint64_t> stored(n);
  SR_RETURN_IF_ERROR(store.pull(table.head.table_id, table.erased, Dtype::kFloat32, rows.data(), {.versions = stored}));
  std::vector<std::uint64_t> gone;
  for (std::size_t i = 0; i < n; ++i) {
    if (stored[i] < table.erased_versions[i]) gone.push_back(table.erased[i]);
  }
  const auto erased = store.erase(table.head.table_id, gone);
  SR_RETURN_IF_ERROR(erased.status());
  applied.erased += erased.value();
  return Status::ok();
}

Status apply_table(Store& store, const TableChanges& table, AppliedPage& applied) {
  const auto dtype = static_cast<Dtype>(table.head.dtype);
  std::vector<float> converted;
  const auto* rows = reinterpret_cast<const float*>(table.rows.data());
  if (dtype != Dtype::kFloat32) {
    const std::size_t bytes = row_bytes(dtype, table.head.dim);
    converted.resize(table.keys.size() * table.head.dim);
    for (std::size_t i = 0; i < table.keys.size(); ++i) {
      convert_to_float(dtype, table.rows.data() + i * bytes, converted.data() + i * table.head.dim, table.head.dim);
    }
    rows = converted.data();
  }
  const auto written = store.changes().assign_newest(table.head.table_id, table.keys, rows, table.versions.data(),
                                                     table.head.replaces != 0);
  SR_RETURN_IF_ERROR(written.status());
  applied.rows += written.value();
  applied.unchanged += table.keys.size() - written.value();
  return table.erased.empty() ? Status::ok() : erase_older(store, table, applied);
}

// What the store has of slots that came whole, or of a part of them, and the page has not, goes; but for tables that
// the sender does not have.
Status erase_others(Store& store, const ParsedPage& page, AppliedPage& applied) {
  using Names = std::unordered_map<std::uint32_t, std::vector<std::uint64_t>>;  // keys by table
  std::unordered_map<std::uint32_t, std::unordered_set<std::uint64_t>> kept;
  for (const TableChanges& table : page.tables) {
    if (table.head.replaces != 0) kept[table.head.table_id].insert(table.keys.begin(), table.keys.end());
  }
  Names gone;
  for (const PageSlot& slot : page.slots) {
    if (slot.kind != static_cast<std::uint8_t>(SlotChanges::Kind::kSnapshot)) continue;
    applied.has_whole_slots = true;
    SlotPlace from, to = kSlotEnd;
    if (const auto part = page.parts.find(slot.slot); part != page.parts.end()) {
      from = {0, part->second.from_table, part->second.from_suffix};
      to = {0, part->second.to_table, part->second.to_suffix};
    }
    const auto rows = store.changes().rows_of(slot.slot, from, to);
    SR_RETURN_IF_ERROR(rows.status());
    for (const ChangedRow& row : rows.value()) {
      const auto stays = kept.find(row.table_id);
      if (stays != kept.end() && !stays->second.contains(row.key)) gone[row.table_id].push_back(row.key);
    }
  }
  for (const auto& [table_id, keys] : kept) applied.tables.push_back(table_id);
  std::ranges::sort(applied.tables);
  for (const auto& [table_id, keys] : gone) {
    const auto erased = store.erase(table_id, keys);
    SR_RETURN_IF_ERROR(erased.status());
    applied.erased += erased.value();
  }
  return Status::ok();
}

}  // namespace

Result<AppliedPage> apply_changes(Store& store, std::span<const std::byte> page) {
  std::vector<std::uint64_t> aligned;
  if (reinterpret_cast<std::uintptr_t>(page.data()) % alignof(std::uint64_t) != 0) {
    aligned.resize(page.size() / sizeof(std::uint64_t) + 1);
    std::memcpy(aligned.data(), page.data(), page.size());
    page = std::as_bytes(std::span(aligned)).first(page.size());
  }
  auto parsed = parse(page);
  SR_RETURN_IF_ERROR(parsed.status());
  for (const PageSlot& slot : parsed.value().slots) {
    if (slot.slot >= store.options().slot_count) return damaged("has a slot that this store has not");
  }
  AppliedPage applied;
  leave_others(store, parsed.value(), applied);
  for (const TableChanges& table : parsed.value().tables) SR_RETURN_IF_ERROR(apply_table(store, table, applied));
  SR_RETURN_IF_ERROR(erase_others(store, parsed.value(), applied));
  for (const PageSlot& slot : parsed.value().slots) {
    if (const auto part = parsed.value().parts.find(slot.slot);
        part != parsed.value().parts.end() && part->second.number != 0) {
      applied.part = part->second.number;
    } else {
      applied.slots.push_back({slot.slot, slot.until, slot.position, slot.oldest_at_ms});
    }
  }
  return applied;
}

Result<std::uint64_t> ChangeLog::assign_newest(std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                               const float* rows, const std::uint64_t* versions, bool replaces) {
  Store::Impl& store = *store_->impl_;
  const std::shared_ptr<Table> table = store.tables.find(table_id);
  if (table == nullptr) return unknown_table(table_id);
  const std::uint32_t dim = table->schema.dim;
  const auto fill = [&](RowRef row, std::size_t at) {
    convert_from_float(table->schema.dtype, rows + at * dim, row.weights(), dim);
    row.set_version(versions[at]);
  };
  VersionFilter filter{.versions = versions, .replaces = replaces};
  SR_RETURN_IF_ERROR(store.put_rows(*store_, *table, keys, 0, fill, &filter));
  return keys.size() - filter.passed_over;
}

}  // namespace sparserow

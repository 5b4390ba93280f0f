#include "store/change_page.h"

#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "util/hash.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kMagic = 0x50435053;  // "SPCP"
constexpr std::uint16_t kFormat = 2;

struct PageHead {
  std::uint32_t magic = kMagic;
  std::uint16_t format = kFormat;
  std::uint16_t zero = 0;
  std::uint32_t slots = 0;
  std::uint32_t zero2 = 0;
  std::uint64_t checksum = 0;
};
static_assert(sizeof(PageHead) == 24);

struct SlotHead {
  std::uint32_t slot = 0;
  std::uint8_t kind = 0;
  std::uint8_t zero[3] = {};
  std::uint32_t tables = 0;
  std::uint32_t oldest_at_ms = 0;
  std::uint64_t since = 0;
  std::uint64_t until = 0;
  std::uint64_t position = 0;
};
static_assert(sizeof(SlotHead) == 40);

struct TableHead {
  std::uint32_t table_id = 0;
  std::uint32_t schema_version = 0;
  std::uint32_t dim = 0;
  std::uint8_t dtype = 0;
  std::uint8_t zero[3] = {};
  std::uint32_t n = 0;
  std::uint32_t erased = 0;
};
static_assert(sizeof(TableHead) == 24);

std::uint64_t padded(std::uint64_t bytes) { return (bytes + 7) & ~std::uint64_t{7}; }

template <class T>
void append(std::vector<std::byte>& out, const T* values, std::size_t count) {
  const auto bytes = std::as_bytes(std::span(values, count));
  out.insert(out.end(), bytes.begin(), bytes.end());
}

// A slot's changes as they go into a page.
class SlotWriter {
 public:
  SlotWriter(const Store& store, ChangeHold* hold, std::vector<std::byte>& out)
      : store_(store), hold_(hold), out_(out) {}

  // Whether anything of it goes: a slot whose rows all wait is left out.
  Result<bool> write(SlotChanges& changes) {
    if (hold_ != nullptr) hold_->begin(changes);
    SlotHead head{.slot = changes.slot,
                  .kind = static_cast<std::uint8_t>(changes.kind),
                  .zero = {},
                  .tables = 0,
                  .oldest_at_ms = changes.oldest_at_ms,
                  .since = changes.since,
                  .until = changes.until,
                  .position = changes.until};
    const std::size_t at = out_.size();
    append(out_, &head, 1);
    for (const ChangedKeys& table : changes.tables) SR_RETURN_IF_ERROR(write_table(changes, table, head.tables));
    if (hold_ != nullptr) {
      const bool is_sent = head.tables > 0 || changes.kind == SlotChanges::Kind::kSnapshot;
      const ChangeHold::Look look = hold_->end(changes, is_sent);
      head.until = look.safe;
      head.oldest_at_ms = look.oldest_at_ms;
      if (!is_sent) {
        out_.resize(at);
        return false;
      }
    }
    std::memcpy(out_.data() + at, &head, sizeof head);
    return true;
  }

 private:
  // The rows that a table's keys have now; those that went meanwhile are left out, and come as tombstones later.
  Status write_table(const SlotChanges& changes, const ChangedKeys& changed, std::uint32_t& tables) {
    const auto schema = store_.schema(changed.table_id);
    if (!schema) return Status::ok();  // dropped since: the next read of the slot says so
    const std::size_t bytes_of_row = row_bytes(schema->dtype, schema->dim);
    std::vector<std::byte> rows(changed.keys.size() * bytes_of_row);
    std::vector<std::uint64_t> versions(changed.keys.size());
    std::vector<std::uint8_t> goes(changed.keys.size());
    const Status pulled =
        store_.pull(changed.table_id, changed.keys, schema->dtype, rows.data(), {versions.data(), goes.data()});
    if (pulled.code() == Code::kNotFound) return Status::ok();
    SR_RETURN_IF_ERROR(pulled);
    if (hold_ != nullptr) {
      std::vector<float> floats(changed.keys.size() * schema->dim);
      for (std::size_t i = 0; i < changed.keys.size(); ++i) {
        convert_to_float(schema->dtype, rows.data() + i * bytes_of_row, floats.data() + i * schema->dim, schema->dim);
      }
      goes = hold_->choose(changes, changed, schema->dim, floats, goes);
    }
    std::vector<std::uint64_t> keys;
    for (std::size_t i = 0; i < changed.keys.size(); ++i) {
      if (goes[i] == 0) continue;
      versions[keys.size()] = versions[i];
      std::memmove(rows.data() + keys.size() * bytes_of_row, rows.data() + i * bytes_of_row, bytes_of_row);
      keys.push_back(changed.keys[i]);
    }
    if (hold_ != nullptr && keys.empty() && changed.erased.empty()) return Status::ok();
    TableHead head{.table_id = schema->id,
                   .schema_version = schema->version,
                   .dim = schema->dim,
                   .dtype = static_cast<std::uint8_t>(schema->dtype),
                   .zero = {},
                   .n = static_cast<std::uint32_t>(keys.size()),
                   .erased = static_cast<std::uint32_t>(changed.erased.size())};
    append(out_, &head, 1);
    append(out_, keys.data(), keys.size());
    append(out_, versions.data(), keys.size());
    append(out_, changed.erased.data(), changed.erased.size());
    append(out_, changed.erased_versions.data(), changed.erased.size());
    append(out_, rows.data(), keys.size() * bytes_of_row);
    out_.resize(padded(out_.size()));
    ++tables;
    return Status::ok();
  }

  const Store& store_;
  ChangeHold* hold_;
  std::vector<std::byte>& out_;
};

Status damaged(const std::string& what) { return {Code::kDataLoss, "page of changes: " + what}; }

// Reads a page from its front; every length is checked against what is left.
class PageReader {
 public:
  explicit PageReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  bool read(T& value) {
    if (rest_.size() < sizeof value) return false;
    std::memcpy(&value, rest_.data(), sizeof value);
    rest_ = rest_.subspan(sizeof value);
    return true;
  }
  template <class T>
  bool read(std::vector<T>& values, std::size_t count) {
    if (count > rest_.size() / sizeof(T)) return false;
    values.resize(count);
    if (count > 0) std::memcpy(values.data(), rest_.data(), count * sizeof(T));
    rest_ = rest_.subspan(count * sizeof(T));
    return true;
  }
  [[nodiscard]] bool is_empty() const noexcept { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

struct TableChanges {
  TableHead head;
  std::vector<std::uint64_t> keys, versions, erased, erased_versions;
  std::vector<std::byte> rows;
};
struct SlotPage {
  SlotHead head;
  std::vector<TableChanges> tables;
};

bool read_table(PageReader& reader, TableChanges& table) {
  TableHead& head = table.head;
  if (!reader.read(head) || head.dim < 1 || head.dim > kMaxDim || !is_valid(static_cast<Dtype>(head.dtype))) {
    return false;
  }
  const std::size_t bytes = row_bytes(static_cast<Dtype>(head.dtype), head.dim);
  return reader.read(table.keys, head.n) && reader.read(table.versions, head.n) &&
         reader.read(table.erased, head.erased) && reader.read(table.erased_versions, head.erased) &&
         reader.read(table.rows, padded(head.n * bytes));
}

Result<std::vector<SlotPage>> parse(std::span<const std::byte> page) {
  PageReader reader(page);
  PageHead head;
  if (!reader.read(head) || head.magic != kMagic || head.format != kFormat || head.zero != 0 || head.zero2 != 0)
    return damaged("is none, or of another format");
  const auto covered = page.subspan(sizeof head);
  if (XXH3_64bits(covered.data(), covered.size()) != head.checksum) return damaged("fails its checksum");
  std::vector<SlotPage> slots;
  for (std::uint32_t i = 0; i < head.slots; ++i) {
    SlotPage& slot = slots.emplace_back();
    if (!reader.read(slot.head)) return damaged("ends within a slot");
    for (std::uint32_t t = 0; t < slot.head.tables; ++t) {
      if (!read_table(reader, slot.tables.emplace_back())) return damaged("ends within a table");
    }
  }
  if (!reader.is_empty()) return damaged("has bytes after its last slot");
  return slots;
}

Status check_schema(const Store& store, const TableHead& head) {
  const auto schema = store.schema(head.table_id);
  if (!schema || (schema->dim == head.dim && schema->version == head.schema_version)) return Status::ok();
  return {Code::kFailedPrecondition, "table '" + schema->name + "': changes have schema version " +
                                         std::to_string(head.schema_version) + " and dim " + std::to_string(head.dim) +
                                         ", this store " + std::to_string(schema->version) + " and " +
                                         std::to_string(schema->dim)};
}

// Versions that the store has of keys; 0 for absent ones.
Result<std::vector<std::uint64_t>> held_versions(const Store& store, const TableSchema& schema,
                                                 std::span<const std::uint64_t> keys) {
  std::vector<std::byte> rows(keys.size() * row_bytes(Dtype::kFloat32, schema.dim));
  std::vector<std::uint64_t> versions(keys.size());
  SR_RETURN_IF_ERROR(store.pull(schema.id, keys, Dtype::kFloat32, rows.data(), {.versions = versions.data()}));
  return versions;
}

Status apply_table(Store& store, const TableChanges& table, const TableSchema& schema, bool replaces,
                   AppliedPage& applied) {
  auto held = held_versions(store, schema, table.keys);
  SR_RETURN_IF_ERROR(held.status());
  std::vector<std::uint64_t> keys, versions;
  std::vector<float> rows;
  const auto dtype = static_cast<Dtype>(table.head.dtype);
  const std::size_t bytes = row_bytes(dtype, schema.dim);
  for (std::size_t i = 0; i < table.keys.size(); ++i) {
    const std::uint64_t known = held.value()[i];
    if (replaces ? known == table.versions[i] : known >= table.versions[i]) {
      ++applied.unchanged;
      continue;
    }
    keys.push_back(table.keys[i]);
    versions.push_back(table.versions[i]);
    rows.resize(rows.size() + schema.dim);
    convert_to_float(dtype, table.rows.data() + i * bytes, rows.data() + rows.size() - schema.dim, schema.dim);
  }
  SR_RETURN_IF_ERROR(store.assign_versions(schema.id, keys, rows.data(), versions.data()));
  applied.rows += keys.size();
  auto held_of_erased = held_versions(store, schema, table.erased);
  SR_RETURN_IF_ERROR(held_of_erased.status());
  std::vector<std::uint64_t> gone;
  for (std::size_t i = 0; i < table.erased.size(); ++i) {
    if (held_of_erased.value()[i] < table.erased_versions[i]) gone.push_back(table.erased[i]);
  }
  const auto erased = store.erase(schema.id, gone);
  SR_RETURN_IF_ERROR(erased.status());
  applied.erased += erased.value();
  return Status::ok();
}

// What the store has of a slot and the snapshot has not goes.
Status erase_others(Store& store, const SlotPage& slot, AppliedPage& applied) {
  std::unordered_map<std::uint32_t, std::unordered_set<std::uint64_t>> kept;
  for (const TableChanges& table : slot.tables) kept[table.head.table_id].insert(table.keys.begin(), table.keys.end());
  auto held = store.changes().keys_of(slot.head.slot);
  SR_RETURN_IF_ERROR(held.status());
  for (const ChangedKeys& table : held.value()) {
    const auto& stays = kept[table.table_id];
    std::vector<std::uint64_t> gone;
    std::copy_if(table.keys.begin(), table.keys.end(), std::back_inserter(gone),
                 [&](std::uint64_t key) { return !stays.contains(key); });
    const auto erased = store.erase(table.table_id, gone);
    SR_RETURN_IF_ERROR(erased.status());
    applied.erased += erased.value();
  }
  return Status::ok();
}

}  // namespace

Result<ChangePage> read_changes(Store& store, const std::string& cursor, std::uint32_t begin, std::uint64_t max_bytes) {
  constexpr std::size_t kMostSlots = 4096;
  ChangeLog& log = store.changes();
  const auto hold = log.hold_of(cursor);
  SR_RETURN_IF_ERROR(hold.status());
  const auto behind = log.slots_behind(cursor, begin, kMostSlots);
  SR_RETURN_IF_ERROR(behind.status());
  ChangePage page{.bytes = std::vector<std::byte>(sizeof(PageHead)), .slots = 0, .next_begin = begin, .is_last = false};
  SlotWriter writer(store, hold.value().get(), page.bytes);
  std::size_t looked_at = 0;
  for (const std::uint32_t slot : behind.value()) {
    if (page.slots > 0 && page.bytes.size() >= max_bytes) break;
    auto changes = log.read(cursor, slot);
    SR_RETURN_IF_ERROR(changes.status());
    const auto is_sent = writer.write(changes.value());
    SR_RETURN_IF_ERROR(is_sent.status());
    if (!is_sent.value()) SR_RETURN_IF_ERROR(log.passed(cursor, slot, changes.value().until));
    page.slots += is_sent.value() ? 1 : 0;
    ++looked_at;
    page.next_begin = (slot + 1) % store.options().slot_count;
  }
  page.is_last = behind.value().size() < kMostSlots && looked_at == behind.value().size();
  PageHead head;
  head.slots = page.slots;
  head.checksum = XXH3_64bits(page.bytes.data() + sizeof head, page.bytes.size() - sizeof head);
  std::memcpy(page.bytes.data(), &head, sizeof head);
  return page;
}

Result<AppliedPage> apply_changes(Store& store, std::span<const std::byte> page) {
  const auto slots = parse(page);
  SR_RETURN_IF_ERROR(slots.status());
  for (const SlotPage& slot : slots.value()) {
    if (slot.head.slot >= store.options().slot_count) return damaged("has a slot that this store has not");
    for (const TableChanges& table : slot.tables) SR_RETURN_IF_ERROR(check_schema(store, table.head));
  }
  AppliedPage applied;
  for (const SlotPage& slot : slots.value()) {
    const bool replaces = slot.head.kind == static_cast<std::uint8_t>(SlotChanges::Kind::kSnapshot);
    for (const TableChanges& table : slot.tables) {
      const auto schema = store.schema(table.head.table_id);
      if (schema) SR_RETURN_IF_ERROR(apply_table(store, table, *schema, replaces, applied));
    }
    if (replaces) SR_RETURN_IF_ERROR(erase_others(store, slot, applied));
    applied.slots.push_back({slot.head.slot, slot.head.until, slot.head.position, slot.head.oldest_at_ms});
  }
  return applied;
}

}  // namespace sparserow

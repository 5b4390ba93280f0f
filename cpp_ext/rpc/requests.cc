// What a connection does with each request: checks it, sends it to what serves it (serve_pulls.cc,
// serve_writes.cc), and walks tables itself.
#include <algorithm>
#include <cstring>

#include "rpc/connection.h"
#include "rpc/reply_frames.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxScanBytes = 16u << 20;
constexpr std::uint64_t kBulkBytes = 4u << 20;  // of keys and gradients, which take some ten milliseconds to apply

}  // namespace

Status Connection::check_request(const FrameHeader& header) const {
  if (core_.draining) return Status(Code::kUnavailable, "the shard is draining");
  const std::uint32_t epoch = core_.route()->epoch;
  if (header.route_epoch > epoch) {
    return Status(Code::kUnavailable, "route epoch " + std::to_string(header.route_epoch) +
                                          " is not known yet to this shard, which has " + std::to_string(epoch));
  }
  if (header.route_epoch < epoch) {
    return Status(Code::kStaleRoute, "route epoch: the request has " + std::to_string(header.route_epoch) +
                                         ", this shard " + std::to_string(epoch));
  }
  return Status::ok();
}

Status Connection::check_refusal(std::uint32_t table_id) const {
  const auto route = core_.route();
  const auto& refused = route->refused_tables;
  return std::binary_search(refused.begin(), refused.end(), table_id) ? route->refusal : Status::ok();
}

Status Connection::check_table(const Store& store, const TableDescriptor& descriptor) const {
  SR_RETURN_IF_ERROR(check_refusal(descriptor.table_id));
  const auto schema = store.schema(descriptor.table_id);
  if (!schema) {
    return no_table(descriptor.table_id);
  }
  SR_RETURN_IF_ERROR(grant_.allows_table(schema->name));
  if (descriptor.schema_version != schema->version) {
    return Status(Code::kInvalidArgument, "table '" + schema->name + "': the request has schema version " +
                                              std::to_string(descriptor.schema_version) + ", the table " +
                                              std::to_string(schema->version));
  }
  if (descriptor.dim != schema->dim) {
    return Status(Code::kInvalidArgument, "table '" + schema->name + "': the request has dim " +
                                              std::to_string(descriptor.dim) + ", the table " +
                                              std::to_string(schema->dim));
  }
  return Status::ok();
}

Status Connection::check_owner(std::uint32_t table_id, std::span<const std::uint64_t> keys) const {
  const auto route = core_.route();
  if (route->slot_owner.empty()) return Status::ok();
  const auto slots = static_cast<std::uint32_t>(route->slot_owner.size());
  for (const std::uint64_t key : keys) {
    const std::uint16_t owner = route->slot_owner[slot_of(row_hash(table_id, key), slots)];
    if (owner == core_.options.shard_index) continue;
    return Status(Code::kStaleRoute, "key " + std::to_string(key) + " belongs to shard " + std::to_string(owner) +
                                         ", not to shard " + std::to_string(core_.options.shard_index));
  }
  return Status::ok();
}

Connection::Task<Connection::Outcome> Connection::dispatch(const FrameHeader& header, Body& body,
                                                           Clock::time_point deadline, const Arrival& arrival) {
  const auto type = static_cast<FrameType>(header.type);
  if (type == FrameType::kPing) {
    // Sections of a PING are walked like any other's, so that a broken one is noticed.
    std::vector<TableView> none;
    Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, none);
    if (outcome.status.is_ok()) outcome.reply = empty_frame(reply_to(header, FrameType::kPong));
    co_return outcome;
  }
  if (type != FrameType::kPull && type != FrameType::kPrepare && type != FrameType::kCommit &&
      type != FrameType::kAbort && type != FrameType::kAssign && type != FrameType::kDelete &&
      type != FrameType::kScan && type != FrameType::kLookup && type != FrameType::kHint) {
    co_return Outcome{Status(Code::kInvalidArgument, "header.type: " + std::to_string(header.type) + " (" +
                                                         std::string(type_name(type)) + ") is not a request"),
                      true,
                      {}};
  }
  const CountedRequest counted(core_.counters.requests_dispatched);
  if (Status status = check_access(header); !status.is_ok()) co_return Outcome{std::move(status), false, {}};
  if (Status status = check_request(header); !status.is_ok()) co_return Outcome{std::move(status), false, {}};
  if (Clock::now() >= deadline) {
    co_return Outcome{
        Status(Code::kDeadlineExceeded, "the deadline passed before the shard could serve the request"), false, {}};
  }
  if (type == FrameType::kPull) co_return co_await serve_pull(header, body, deadline, arrival);
  if (type == FrameType::kLookup) co_return co_await serve_lookup(header, body);
  if (type == FrameType::kHint) co_return serve_hint(header, body);
  const bool is_commit = type == FrameType::kCommit;
  const std::uint64_t applied =
      is_commit ? core_.commits.pending_bytes(header.job_id, {header.worker_id, header.worker_epoch}) : 0;
  if (header.body_bytes + applied >= kBulkBytes) co_return co_await serve_on(core_.bulk, header, body);
  // Of what was prepared, rows that exist are in memory; for those to be born the SSD is asked again.
  if (core_.disk != nullptr && type != FrameType::kAbort) co_return co_await serve_on(*core_.disk, header, body);
  co_return serve_write_or_scan(header, body);
}

Connection::Outcome Connection::serve_write_or_scan(const FrameHeader& header, Body& body) {
  switch (static_cast<FrameType>(header.type)) {
    case FrameType::kPrepare:
    case FrameType::kCommit:
      return serve_commit(header, body);
    case FrameType::kAbort:
      return serve_abort(header, body);
    case FrameType::kAssign:
      return serve_assign(header, body);
    case FrameType::kDelete:
      return serve_delete(header, body);
    default:
      return serve_scan(header, body);
  }
}

// Answered at once: what becomes of it is nobody's business.
Connection::Outcome Connection::serve_hint(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, views); !outcome.status.is_ok()) {
    return outcome;
  }
  std::uint64_t taken = 0;
  for (const TableView& view : views) {
    if (core_.hints != nullptr) taken += core_.hints->take(view.descriptor.table_id, view.keys);
  }
  return {Status::ok(), false, ack_frame(header, taken, false)};
}

Connection::Task<Connection::Outcome> Connection::serve_on(asio::thread_pool& threads, const FrameHeader& header,
                                                           Body& body) {
  const auto serve = [this, &header, &body]() -> Task<Outcome> { co_return serve_write_or_scan(header, body); };
  co_return co_await asio::co_spawn(threads.get_executor(), serve, asio::use_awaitable);
}

Connection::Outcome Connection::parse_tables(const FrameHeader& header, std::span<const std::byte> body,
                                             SectionKind kind, std::vector<TableView>& out) const {
  SectionReader sections(body, header.section_count);
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return {section.status(), true, {}};
    if (!section.value()) return {};
    if (section.value()->kind != kind) {
      return {Status(Code::kInvalidArgument,
                     "section.kind: " + std::to_string(static_cast<int>(section.value()->kind)) +
                         " does not belong in " + std::string(type_name(static_cast<FrameType>(header.type)))),
              true,
              {}};
    }
    auto view = parse_table(kind, section.value()->payload);
    if (!view.is_ok()) return {view.status(), true, {}};
    out.push_back(std::move(view).value());
  }
}

Connection::Outcome Connection::serve_scan(const FrameHeader& header, const Body& body) {
  SectionReader sections(body.bytes, header.section_count);
  std::optional<ScanPayload> scan;
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return {section.status(), true, {}};
    if (!section.value()) break;
    if (section.value()->kind != SectionKind::kScan || scan) {
      return {Status(Code::kInvalidArgument, "SCAN: exactly one SCAN section is allowed"), true, {}};
    }
    auto parsed = parse_scan(section.value()->payload);
    if (!parsed.is_ok()) return {parsed.status(), true, {}};
    scan = parsed.value();
  }
  if (!scan) return {Status(Code::kInvalidArgument, "SCAN: the section is missing"), true, {}};
  if (Status status = check_refusal(scan->table_id); !status.is_ok()) return {std::move(status), false, {}};
  const auto schema = core_.store->schema(scan->table_id);
  if (!schema) return {no_table(scan->table_id), false, {}};
  if (Status status = grant_.allows_table(schema->name); !status.is_ok()) return {std::move(status), false, {}};
  if (scan->max_rows == 0) {
    return {Status(Code::kInvalidArgument, "scan.max_rows: 0 is not allowed; allowed: >= 1"), false, {}};
  }
  // State of the optimizers has at most two floats per column.
  const std::uint32_t row_bytes = 20 + 12 * schema->dim;
  const std::uint32_t page_rows = std::clamp(kMaxScanBytes / row_bytes, 1u, scan->max_rows);
  auto page = core_.store->scan(scan->table_id, scan->cursor, page_rows, scan->with_state != 0);
  if (!page.is_ok()) return {page.status(), false, {}};
  const ScanPage& rows = page.value();
  ScanPagePayload head;
  head.next_cursor = rows.next_cursor;
  head.n = static_cast<std::uint32_t>(rows.keys.size());
  head.dim = schema->dim;
  head.state_floats = head.n == 0 ? 0 : static_cast<std::uint32_t>(rows.state.size() / head.n);
  std::vector<std::byte> tail;
  const auto add = [&tail](const auto& values) {
    const auto bytes = std::as_bytes(std::span(values));
    tail.insert(tail.end(), bytes.begin(), bytes.end());
  };
  add(rows.keys);
  add(rows.versions);
  add(rows.update_counts);
  tail.resize(padded8(tail.size()));
  add(rows.rows);
  add(rows.state);
  return {Status::ok(), false,
          small_frame(reply_to(header, FrameType::kScanPage), SectionKind::kScanPage, bytes_of(head), tail)};
}

}  // namespace sparserow::rpc

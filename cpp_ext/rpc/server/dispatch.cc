// What a connection does with each request: checks it, and sends it to what serves it (serve_pulls.cc, serve_writes.cc,
// serve_scans.cc).
#include <algorithm>

#include "rpc/server/connection.h"
#include "rpc/server/reply_frames.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

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
  if (!is_request(type)) {
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
  if (type == FrameType::kLookup) co_return co_await serve_lookup(header, body, deadline);
  if (type == FrameType::kHint) co_return serve_hint(header, body);
  if (type == FrameType::kScan) co_return co_await serve_scan(header, body, deadline);
  asio::thread_pool* threads = threads_for(header);
  if (threads != nullptr) co_return co_await serve_on(*threads, header, body);
  co_return serve_write(header, body);
}

asio::thread_pool* Connection::threads_for(const FrameHeader& header) const {
  const auto type = static_cast<FrameType>(header.type);
  const bool is_commit = type == FrameType::kCommit;
  const std::uint64_t applied =
      is_commit ? core_.commits.pending_bytes(header.job_id, {header.worker_id, header.worker_epoch}) : 0;
  if (header.body_bytes + applied >= kBulkBytes) return &core_.bulk;
  // Prepared rows that exist are in memory; the SSD is asked again for those that are to be created.
  return type == FrameType::kAbort ? nullptr : core_.disk.get();
}

Connection::Outcome Connection::serve_write(const FrameHeader& header, Body& body) {
  switch (static_cast<FrameType>(header.type)) {
    case FrameType::kAbort:
      return serve_abort(header, body);
    case FrameType::kAssign:
      return serve_assign(header, body);
    case FrameType::kDelete:
      return serve_delete(header, body);
    default:
      return serve_commit(header, body);
  }
}

// Answered at once: what becomes of it is nobody's business.
Connection::Outcome Connection::serve_hint(const FrameHeader& header, const Body& body) {
  std::vector<TableView> views;
  if (Outcome outcome = parse_tables(header, body.bytes, SectionKind::kTableKeys, views); !outcome.status.is_ok()) {
    return outcome;
  }
  for (const TableView& view : views) {
    const auto schema = core_.store->schema(view.descriptor.table_id);
    if (!schema) continue;
    if (Status status = grant_.allows_table(schema->name); !status.is_ok()) return {std::move(status), false, {}};
  }
  std::uint64_t taken = 0;
  for (const TableView& view : views) {
    if (core_.hints != nullptr) taken += core_.hints->take(view.descriptor.table_id, view.keys);
  }
  return {Status::ok(), false, ack_frame(header, taken, false)};
}

Connection::Task<Connection::Outcome> Connection::serve_on(asio::thread_pool& threads, const FrameHeader& header,
                                                           Body& body) {
  const auto serve = [this, &header, &body]() -> Task<Outcome> { co_return serve_write(header, body); };
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

}  // namespace sparserow::rpc

// What a connection does with each request: it checks the request and hands it to its handler.
#include "rpc/server/connection.h"
#include "rpc/server/reply_frames.h"
#include "rpc/server/scan_handler.h"
#include "rpc/server/write_handler.h"

namespace sparserow::rpc {
namespace {

constexpr std::uint64_t kBulkBytes = 4u << 20;  // of keys and gradients, which take some ten milliseconds to apply

}  // namespace

Task<Outcome> Connection::dispatch(Request& request) {
  const FrameType type = request.type();
  if (type == FrameType::kPing) {
    // Sections of a PING are walked like any other's, so that a broken one is noticed.
    std::vector<TableView> none;
    Outcome outcome = request.parse_tables(SectionKind::kTableKeys, none);
    if (outcome.is_ok()) outcome.frame = empty_frame(reply_to(request.header, FrameType::kPong));
    co_return outcome;
  }
  if (!is_request(type)) {
    co_return Outcome::broken_grammar({Code::kInvalidArgument, "header.type: " + std::to_string(request.header.type) +
                                                                   " (" + std::string(type_name(type)) +
                                                                   ") is not a request"});
  }
  const CountedRequest counted(core_.counters.requests_dispatched);
  if (Status status = check_access(request.header); !status.is_ok()) co_return Outcome::refused(std::move(status));
  if (Status status = request.check_route(); !status.is_ok()) co_return Outcome::refused(std::move(status));
  if (std::chrono::steady_clock::now() >= request.deadline) {
    co_return Outcome::refused(
        {Code::kDeadlineExceeded, "the deadline passed before the shard could serve the request"});
  }
  if (type == FrameType::kPull) co_return co_await pulls_.serve_pull(request);
  if (type == FrameType::kLookup) co_return co_await pulls_.serve_lookup(request);
  if (type == FrameType::kHint) co_return serve_hint(request);
  if (type == FrameType::kScan) {
    ScanHandler scan(request, accounts_);
    co_return co_await scan.serve();
  }
  WriteHandler write(request);
  asio::thread_pool* threads = threads_for(request);
  if (threads == nullptr) co_return write.serve();
  const auto serve = [&write]() -> Task<Outcome> { co_return write.serve(); };
  co_return co_await asio::co_spawn(threads->get_executor(), serve, asio::use_awaitable);
}

asio::thread_pool* Connection::threads_for(const Request& request) const {
  const FrameHeader& header = request.header;
  const bool is_commit = request.type() == FrameType::kCommit;
  const std::uint64_t applied =
      is_commit ? core_.commits.pending_bytes(header.job_id, {header.worker_id, header.worker_epoch}) : 0;
  if (header.body_bytes + applied >= kBulkBytes) return &core_.bulk;
  // Prepared rows that exist are in memory; the SSD is asked again for those that are to be created.
  return request.type() == FrameType::kAbort ? nullptr : core_.disk.get();
}

// A hint is acknowledged at once, with the number of keys that wait to be fetched.
Outcome Connection::serve_hint(const Request& request) {
  std::vector<TableView> views;
  Outcome outcome = request.parse_tables(SectionKind::kTableKeys, views);
  if (!outcome.is_ok()) return outcome;
  for (const TableView& view : views) {
    const auto schema = core_.store->schema(view.descriptor.table_id);
    if (!schema) continue;
    if (Status status = grant_.allows_table(schema->name); !status.is_ok()) return Outcome::refused(std::move(status));
  }
  std::uint64_t taken = 0;
  for (const TableView& view : views) {
    if (core_.hints != nullptr) taken += core_.hints->take(view.descriptor.table_id, view.keys);
  }
  return Outcome::reply(ack_frame(request.header, taken, false));
}

}  // namespace sparserow::rpc

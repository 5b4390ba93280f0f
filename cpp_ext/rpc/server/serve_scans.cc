// Walks of a table, page by page.
#include <algorithm>

#include "rpc/server/connection.h"
#include "rpc/server/reply_frames.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMaxScanBytes = 16u << 20;

}  // namespace

// The page is charged before it is read: as it comes from the store, as it is packed, and as a frame.
Connection::Task<Connection::Outcome> Connection::serve_scan(const FrameHeader& header, const Body& body,
                                                             Clock::time_point deadline) {
  ScanPlan plan;
  if (Outcome outcome = plan_scan(header, body, plan); !outcome.status.is_ok()) co_return outcome;
  FairBudget::Charge charge;
  if (Status status = co_await charge_reply(charge, 3 * plan.page_bytes, deadline); !status.is_ok()) {
    co_return Outcome{std::move(status), false, {}};
  }
  Outcome outcome;
  if (core_.disk != nullptr) {
    const auto scan = [&]() -> Task<Outcome> { co_return scan_page(header, plan); };
    outcome = co_await asio::co_spawn(core_.disk->get_executor(), scan, asio::use_awaitable);
  } else {
    outcome = scan_page(header, plan);
  }
  outcome.charge = std::move(charge);
  co_return outcome;
}

Connection::Outcome Connection::plan_scan(const FrameHeader& header, const Body& body, ScanPlan& plan) const {
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
  plan.scan = *scan;
  plan.dim = schema->dim;
  plan.page_rows = std::clamp(kMaxScanBytes / row_bytes, 1u, scan->max_rows);
  plan.page_bytes = std::uint64_t{plan.page_rows} * row_bytes;
  return {};
}

Connection::Outcome Connection::scan_page(const FrameHeader& header, const ScanPlan& plan) const {
  auto page = core_.store->scan(plan.scan.table_id, plan.scan.cursor, plan.page_rows, plan.scan.with_state != 0);
  if (!page.is_ok()) return {page.status(), false, {}};
  const ScanPage& rows = page.value();
  ScanPagePayload head;
  head.next_cursor = rows.next_cursor;
  head.n = static_cast<std::uint32_t>(rows.keys.size());
  head.dim = plan.dim;
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

#include "rpc/server/scan_handler.h"

#include <algorithm>

#include "rpc/server/reply_frames.h"
#include "util/not_allowed.h"

namespace sparserow::rpc {
namespace {

constexpr std::uint32_t kMaxScanBytes = 16u << 20;

}  // namespace

Task<Outcome> ScanHandler::serve() {
  if (Outcome outcome = plan(); !outcome.is_ok()) co_return outcome;
  FairBudget::Charge charge;
  if (Status status = co_await accounts_.charge_reply(charge, 3 * page_bytes_, request_.deadline); !status.is_ok()) {
    co_return Outcome::refused(std::move(status));
  }
  Outcome outcome;
  if (request_.core.disk != nullptr) {
    const auto read = [this]() -> Task<Outcome> { co_return read_page(); };
    outcome = co_await asio::co_spawn(request_.core.disk->get_executor(), read, asio::use_awaitable);
  } else {
    outcome = read_page();
  }
  outcome.charge = std::move(charge);
  co_return outcome;
}

Outcome ScanHandler::plan() {
  SectionReader sections(request_.body.bytes, request_.header.section_count);
  std::optional<ScanPayload> scan;
  while (true) {
    auto section = sections.next();
    if (!section.is_ok()) return Outcome::broken_grammar(section.status());
    if (!section.value()) break;
    if (section.value()->kind != SectionKind::kScan || scan) {
      return Outcome::broken_grammar({Code::kInvalidArgument, "SCAN: exactly one SCAN section is allowed"});
    }
    auto parsed = parse_scan(section.value()->payload);
    if (!parsed.is_ok()) return Outcome::broken_grammar(parsed.status());
    scan = parsed.value();
  }
  if (!scan) return Outcome::broken_grammar({Code::kInvalidArgument, "SCAN: the section is missing"});
  if (Status status = request_.check_table_id(*request_.core.store, scan->table_id, dim_); !status.is_ok()) {
    return Outcome::refused(std::move(status));
  }
  if (scan->max_rows == 0) {
    return Outcome::refused(not_allowed("scan.max_rows", 0, ">= 1"));
  }
  const std::uint32_t row_bytes = 20 + 4 * (1 + kMostStatePerColumn) * dim_;
  scan_ = *scan;
  page_rows_ = std::clamp(kMaxScanBytes / row_bytes, 1u, scan->max_rows);
  page_bytes_ = std::uint64_t{page_rows_} * row_bytes;
  return {};
}

Outcome ScanHandler::read_page() const {
  auto page = request_.core.store->scan(scan_.table_id, scan_.cursor, page_rows_, scan_.with_state != 0);
  if (!page.is_ok()) return Outcome::refused(page.status());
  const ScanPage& rows = page.value();
  ScanPagePayload head;
  head.next_cursor = rows.next_cursor;
  head.n = static_cast<std::uint32_t>(rows.keys.size());
  head.dim = dim_;
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
  return Outcome::reply(
      small_frame(reply_to(request_.header, FrameType::kScanPage), SectionKind::kScanPage, bytes_of(head), tail));
}

}  // namespace sparserow::rpc

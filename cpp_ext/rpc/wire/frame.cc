#include "rpc/wire/frame.h"

#include <algorithm>
#include <cstring>
#include <functional>

#include "rpc/wire/crc32c.h"
#include "rpc/wire/scaled_rows.h"
#include "util/not_allowed.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kMaxErrorBytes = 4096;

Status bad(std::string message) { return Status(Code::kInvalidArgument, std::move(message)); }

// Cuts `bytes` from the front; the caller has checked that they are there.
std::span<const std::byte> take(std::span<const std::byte>& rest, std::uint64_t bytes) {
  const auto part = rest.first(bytes);
  rest = rest.subspan(bytes);
  return part;
}

template <class T>
std::span<const T> as(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

bool all_zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}

// Reads a fixed payload; `exact` refuses bytes after it.
template <class T>
Result<T> parse_fixed(std::span<const std::byte> payload, const char* what, bool exact) {
  if (payload.size() < sizeof(T) || (exact && payload.size() != sizeof(T))) {
    return bad(std::string(what) + " section: " + std::to_string(payload.size()) + " bytes; " +
               std::to_string(sizeof(T)) + " expected");
  }
  T value;
  std::memcpy(&value, payload.data(), sizeof value);
  return value;
}

}  // namespace

std::string_view type_name(FrameType type) noexcept {
  constexpr std::string_view kNames[] = {"",       "HELLO",     "HELLO_ACK", "PULL",  "ROWS",   "PREPARE",
                                         "COMMIT", "ABORT",     "ACK",       "ERROR", "ASSIGN", "DELETE",
                                         "SCAN",   "SCAN_PAGE", "PING",      "PONG",  "LOOKUP", "HINT"};
  const auto index = static_cast<std::size_t>(type);
  return index > 0 && index < std::size(kNames) ? kNames[index] : "unknown";
}

bool is_request(FrameType type) noexcept {
  switch (type) {
    case FrameType::kPull:
    case FrameType::kPrepare:
    case FrameType::kCommit:
    case FrameType::kAbort:
    case FrameType::kAssign:
    case FrameType::kDelete:
    case FrameType::kScan:
    case FrameType::kPing:
    case FrameType::kLookup:
    case FrameType::kHint:
      return true;
    default:
      return false;
  }
}

bool is_spoken(std::uint8_t version, FrameType type) noexcept {
  const bool greets = type == FrameType::kHello || type == FrameType::kHelloAck || type == FrameType::kError;
  return (version >= kProtocolMin && version <= kProtocolVersion) || (greets && version == kGreetingVersion);
}

Status check_header(const FrameHeader& header, std::uint64_t max_body_bytes) {
  if (!is_spoken(header.version, static_cast<FrameType>(header.type))) {
    return not_allowed("header.version", header.version, range_text(kProtocolMin, kProtocolVersion));
  }
  constexpr unsigned kKnown =
      kFrameHasCrc | kFramePrepared | kFrameGradSum | kFrameWrites | kFrameLost | kFrameCrcLast | kFrameInLane;
  if ((header.flags & ~kKnown) != 0) {
    return bad("header.flags: unknown bit in " + std::to_string(header.flags));
  }
  if (header.body_bytes % 8 != 0) {
    return bad("header.body_bytes: " + std::to_string(header.body_bytes) + " is not a multiple of 8");
  }
  if (header.body_bytes > max_body_bytes) {
    return bad("header.body_bytes: " + std::to_string(header.body_bytes) + "; at most " +
               std::to_string(max_body_bytes));
  }
  if (header.section_count > kMaxSections) {
    return bad("header.section_count: " + std::to_string(header.section_count) + "; at most " +
               std::to_string(kMaxSections));
  }
  if (header.section_count > header.body_bytes / sizeof(SectionHeader)) {
    return bad("header.section_count: " + std::to_string(header.section_count) + " sections cannot fit " +
               std::to_string(header.body_bytes) + " bytes");
  }
  if ((header.flags & kFrameHasCrc) == 0 && header.crc32c != 0) return bad("header.crc32c: set without its flag");
  return Status::ok();
}

Status check_protocol(const HelloPayload& peer, std::string_view its, std::string_view own) {
  if (peer.protocol_min <= kProtocolVersion && peer.protocol_max >= kProtocolMin) return Status::ok();
  const auto range = [](std::uint8_t from, std::uint8_t to) {
    return std::to_string(from) + " to " + std::to_string(to);
  };
  return Status(Code::kFailedPrecondition, "protocol: " + std::string(its) + " speaks " +
                                               range(peer.protocol_min, peer.protocol_max) + ", " + std::string(own) +
                                               " " + range(kProtocolMin, kProtocolVersion));
}

Status check_crc(const FrameHeader& header, std::span<const std::byte> body) {
  if ((header.flags & kFrameHasCrc) == 0) return Status::ok();
  FrameHeader plain = header;
  plain.crc32c = 0;
  const std::uint32_t crc = crc32c(crc32c(0, &plain, sizeof plain), body.data(), body.size());
  if (crc == header.crc32c) return Status::ok();
  return Status(Code::kDataLoss,
                "frame checksum: " + std::to_string(crc) + " computed, " + std::to_string(header.crc32c) + " received");
}

Result<std::optional<Section>> SectionReader::next() {
  while (sections_left_ > 0) {
    if (rest_.size() < sizeof(SectionHeader)) return bad("section header: truncated");
    SectionHeader header;
    std::memcpy(&header, rest_.data(), sizeof header);
    rest_ = rest_.subspan(sizeof header);
    if (header.reserved != 0) return bad("section.reserved: not zero");
    if ((header.flags & ~kSectionRequired) != 0) return bad("section.flags: unknown bit");
    if (header.payload_bytes > rest_.size() || padded8(header.payload_bytes) > rest_.size()) {
      return bad("section.payload_bytes: " + std::to_string(header.payload_bytes) + "; " +
                 std::to_string(rest_.size()) + " bytes are left");
    }
    const auto payload = take(rest_, header.payload_bytes);
    if (!all_zero(take(rest_, padded8(header.payload_bytes) - header.payload_bytes))) {
      return bad("section padding: not zero");
    }
    --sections_left_;
    const bool is_known = header.kind >= static_cast<std::uint16_t>(SectionKind::kHello) &&
                          header.kind <= static_cast<std::uint16_t>(SectionKind::kScanPage);
    const bool is_later = header.kind >= static_cast<std::uint16_t>(SectionKind::kChecksum) &&
                          header.kind <= static_cast<std::uint16_t>(SectionKind::kLaneRows);
    if (is_known || is_later) {
      return std::optional<Section>(Section{static_cast<SectionKind>(header.kind), payload});
    }
    if ((header.flags & kSectionRequired) != 0) {
      return bad("section.kind: " + std::to_string(header.kind) + " is unknown and required");
    }
  }
  if (!rest_.empty()) return bad("body: " + std::to_string(rest_.size()) + " bytes after the last section");
  return std::optional<Section>();
}

Result<TableLayout> layout_of(SectionKind kind, std::uint8_t flags) {
  const bool versions = (flags & kTableVersions) != 0;
  const bool found = (flags & kTableFound) != 0;
  const bool known = (flags & kTableKnown) != 0;
  const bool exponents = (flags & kTableExponents) != 0;
  const bool placed = (flags & kTablePlaced) != 0;
  if ((flags & ~(kTableVersions | kTableFound | kTableKnown | kTableExponents | kTablePlaced)) != 0)
    return bad("table.flags: unknown bit in " + std::to_string(flags));
  if (placed && (known || kind != SectionKind::kTableRows)) {
    return bad("table.flags: placed rows are those of a whole reply");
  }
  if (exponents && kind != SectionKind::kTableGrads) return bad("table.flags: exponents are for rows that are sent");
  if (known && !versions) return bad("table.flags: a conditional pull must ask for versions");
  switch (kind) {
    case SectionKind::kTableKeys:
      return TableLayout{.keys = true, .known = known};
    case SectionKind::kTableRows:
      return TableLayout{.positions = known, .rows = !placed, .versions = versions, .found = found};
    case SectionKind::kTableGrads:
      if ((flags & ~kTableExponents) != 0) return bad("table.flags: gradients carry exponents alone");
      return TableLayout{.keys = true, .exponents = exponents, .rows = true};
    default:
      return bad("section.kind: not a table section");
  }
}

std::uint64_t table_payload_bytes(const TableDescriptor& descriptor, const TableLayout& layout) noexcept {
  // n < 2^32, dim <= 2^14 and 4 bytes an element: no product here reaches 2^64.
  const std::uint64_t n = descriptor.n;
  std::uint64_t bytes = sizeof(TableDescriptor);
  if (layout.keys) bytes += n * 8;
  if (layout.known) bytes += n * 8;
  if (layout.positions) bytes += padded8(n * 4);
  if (layout.exponents) bytes += padded8(n);
  if (layout.rows) bytes += padded8(n * descriptor.dim * size_of(descriptor.dtype));
  if (layout.versions) bytes += n * 8;
  if (layout.found) bytes += padded8(n);
  return bytes;
}

Status check_descriptor(const TableDescriptor& descriptor) {
  if (descriptor.reserved != 0 || descriptor.reserved2 != 0 || descriptor.reserved3 != 0) {
    return bad("table.reserved: not zero");
  }
  if (descriptor.dim == 0 || descriptor.dim > kMaxDim) {
    return not_allowed("table.dim", descriptor.dim, range_text(1, kMaxDim));
  }
  if (!is_valid(descriptor.dtype)) {
    return not_allowed("table.dtype", static_cast<int>(descriptor.dtype), range_text(0, 2));
  }
  return Status::ok();
}

std::uint64_t rows_section_bytes(const TableDescriptor& asked) noexcept {
  const auto wants = [&asked](TableFlags flag) { return (asked.flags & flag) != 0; };
  return sizeof(SectionHeader) + table_payload_bytes(asked, {.positions = wants(kTableKnown),
                                                             .rows = !wants(kTablePlaced),
                                                             .versions = wants(kTableVersions),
                                                             .found = wants(kTableFound)});
}

Result<TableView> parse_table(SectionKind kind, std::span<const std::byte> payload) {
  auto descriptor = parse_fixed<TableDescriptor>(payload, "table", false);
  if (!descriptor.is_ok()) return descriptor.status();
  TableView view{.descriptor = descriptor.value(),
                 .keys = {},
                 .known = {},
                 .positions = {},
                 .exponents = {},
                 .rows = {},
                 .versions = {},
                 .found = {}};
  SR_RETURN_IF_ERROR(check_descriptor(view.descriptor));
  const auto layout = layout_of(kind, view.descriptor.flags);
  if (!layout.is_ok()) return layout.status();
  if (kind == SectionKind::kTableGrads && layout.value().exponents == (view.descriptor.dtype == Dtype::kFloat32)) {
    return bad("table.flags: sent rows of 16 bits carry exponents, those of float32 none");
  }
  const std::uint64_t expected = table_payload_bytes(view.descriptor, layout.value());
  if (payload.size() != expected) {
    return bad("table.n: " + std::to_string(view.descriptor.n) + " rows of dim " + std::to_string(view.descriptor.dim) +
               " need " + std::to_string(expected) + " bytes; the section has " + std::to_string(payload.size()));
  }
  const std::uint64_t n = view.descriptor.n;
  auto rest = payload.subspan(sizeof(TableDescriptor));
  if (layout.value().keys) view.keys = as<std::uint64_t>(take(rest, n * 8));
  if (layout.value().known) view.known = as<std::uint64_t>(take(rest, n * 8));
  if (layout.value().positions) {
    view.positions = as<std::uint32_t>(take(rest, n * 4));
    if (!all_zero(take(rest, padded8(n * 4) - n * 4))) return bad("table padding: not zero");
    if (std::adjacent_find(view.positions.begin(), view.positions.end(), std::greater_equal<>()) !=
        view.positions.end()) {
      return bad("table.positions: must rise");
    }
  }
  if (layout.value().exponents) {
    view.exponents = as<std::int8_t>(take(rest, n));
    if (!all_zero(take(rest, padded8(n) - n))) return bad("table padding: not zero");
    if (!are_exponents(view.exponents)) {
      return bad("table.exponents: allowed: " + range_text(kLeastExponent, kMostExponent));
    }
  }
  if (layout.value().rows) {
    const std::uint64_t bytes = n * view.descriptor.dim * size_of(view.descriptor.dtype);
    view.rows = take(rest, bytes);
    if (!all_zero(take(rest, padded8(bytes) - bytes))) return bad("table padding: not zero");
  }
  if (layout.value().versions) view.versions = as<std::uint64_t>(take(rest, n * 8));
  if (layout.value().found) {
    view.found = as<std::uint8_t>(take(rest, n));
    if (!all_zero(take(rest, padded8(n) - n))) return bad("table padding: not zero");
  }
  return view;
}

Result<HelloPayload> parse_hello(std::span<const std::byte> payload) {
  auto hello = parse_fixed<HelloPayload>(payload, "HELLO", false);
  if (!hello.is_ok()) return hello;
  if (hello.value().magic != kHelloMagic) return bad("hello.magic: this is not a Sparserow peer");
  if (payload.size() != sizeof(HelloPayload) + std::uint64_t{hello.value().token_bytes}) {
    return bad("hello.token_bytes: " + std::to_string(hello.value().token_bytes) + "; " +
               std::to_string(payload.size() - sizeof(HelloPayload)) + " bytes follow");
  }
  return hello;
}

Result<AckPayload> parse_ack(std::span<const std::byte> payload) {
  return parse_fixed<AckPayload>(payload, "ACK", true);
}

Result<LanePayload> parse_lane(std::span<const std::byte> payload) {
  return parse_fixed<LanePayload>(payload, "LANE", true);
}

Result<LanePlacePayload> parse_lane_place(std::span<const std::byte> payload) {
  auto place = parse_fixed<LanePlacePayload>(payload, "LANE_PLACE", true);
  if (place.is_ok() && place.value().offset % 8 != 0) return bad("lane_place.offset: not a multiple of 8");
  return place;
}

Result<std::vector<std::uint64_t>> parse_lane_rows(std::span<const std::byte> payload) {
  if (payload.size() % sizeof(std::uint64_t) != 0) return bad("lane_rows: not a list of offsets");
  std::vector<std::uint64_t> offsets(payload.size() / sizeof(std::uint64_t));
  if (!offsets.empty()) std::memcpy(offsets.data(), payload.data(), payload.size());
  return offsets;
}

Result<ScanPayload> parse_scan(std::span<const std::byte> payload) {
  auto scan = parse_fixed<ScanPayload>(payload, "SCAN", true);
  if (!scan.is_ok()) return scan;
  if (scan.value().reserved != 0) return bad("scan.reserved: not zero");
  if (scan.value().with_state > 1) return not_allowed("scan.with_state", scan.value().with_state, "0, 1");
  return scan;
}

Status parse_error(std::span<const std::byte> payload) {
  auto error = parse_fixed<ErrorPayload>(payload, "ERROR", false);
  if (!error.is_ok()) return error.status();
  const auto message = payload.subspan(sizeof(ErrorPayload));
  const std::uint16_t code = error.value().code;
  if (message.size() != error.value().message_bytes || error.value().reserved != 0 || code == 0) {
    return bad("ERROR section: malformed");
  }
  const bool known = code <= static_cast<std::uint16_t>(Code::kPermissionDenied);
  return Status(known ? static_cast<Code>(code) : Code::kInternal,
                std::string(reinterpret_cast<const char*>(message.data()), message.size()));
}

Result<ScanPageView> parse_scan_page(std::span<const std::byte> payload) {
  auto page = parse_fixed<ScanPagePayload>(payload, "SCAN_PAGE", false);
  if (!page.is_ok()) return page.status();
  ScanPageView view{.page = page.value(), .keys = {}, .versions = {}, .update_counts = {}, .rows = {}, .state = {}};
  const std::uint64_t n = view.page.n;
  const std::uint64_t dim = view.page.dim;
  const std::uint64_t state = view.page.state_floats;
  if (dim > kMaxDim || state > std::uint64_t{kMostStatePerColumn} * kMaxDim || view.page.reserved != 0) {
    return bad("SCAN_PAGE section: dim " + std::to_string(dim) + ", state_floats " + std::to_string(state));
  }
  const std::uint64_t expected = sizeof(ScanPagePayload) + n * 16 + padded8(n * 4) + n * dim * 4 + n * state * 4;
  if (payload.size() != expected) {
    return bad("SCAN_PAGE section: " + std::to_string(payload.size()) + " bytes; " + std::to_string(expected) +
               " expected");
  }
  auto rest = payload.subspan(sizeof(ScanPagePayload));
  view.keys = as<std::uint64_t>(take(rest, n * 8));
  view.versions = as<std::uint64_t>(take(rest, n * 8));
  view.update_counts = as<std::uint32_t>(take(rest, padded8(n * 4)).first(n * 4));
  view.rows = as<float>(take(rest, n * dim * 4));
  view.state = as<float>(take(rest, n * state * 4));
  return view;
}

std::vector<std::byte> empty_frame(FrameHeader header) {
  header.body_bytes = 0;
  header.section_count = 0;
  if ((header.flags & kFrameHasCrc) != 0) seal_crc(header, {});
  std::vector<std::byte> out(sizeof header);
  std::memcpy(out.data(), &header, sizeof header);
  return out;
}

std::vector<std::byte> small_frame(FrameHeader header, SectionKind kind, std::span<const std::byte> head,
                                   std::span<const std::byte> tail) {
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(kind);
  section.flags = kSectionRequired;
  section.payload_bytes = head.size() + tail.size();
  header.section_count = 1;
  header.body_bytes = static_cast<std::uint32_t>(sizeof section + padded8(section.payload_bytes));
  std::vector<std::byte> out(sizeof header + header.body_bytes);
  std::byte* body = out.data() + sizeof header;
  std::memcpy(body, &section, sizeof section);
  if (!head.empty()) std::memcpy(body + sizeof section, head.data(), head.size());
  if (!tail.empty()) std::memcpy(body + sizeof section + head.size(), tail.data(), tail.size());
  if ((header.flags & kFrameHasCrc) != 0) {
    const iovec piece{body, header.body_bytes};
    seal_crc(header, std::span(&piece, 1));
  }
  std::memcpy(out.data(), &header, sizeof header);
  return out;
}

std::vector<std::byte> with_section(std::span<const std::byte> frame, SectionKind kind,
                                    std::span<const std::byte> payload) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof header);
  SectionHeader section;
  section.kind = static_cast<std::uint16_t>(kind);
  section.payload_bytes = payload.size();
  std::vector<std::byte> out(frame.begin(), frame.end());
  out.resize(frame.size() + sizeof section + padded8(payload.size()));
  std::memcpy(out.data() + frame.size(), &section, sizeof section);
  std::memcpy(out.data() + frame.size() + sizeof section, payload.data(), payload.size());
  header.body_bytes = static_cast<std::uint32_t>(out.size() - sizeof header);
  ++header.section_count;
  if ((header.flags & kFrameHasCrc) != 0) {
    const iovec piece{out.data() + sizeof header, header.body_bytes};
    seal_crc(header, std::span(&piece, 1));
  }
  std::memcpy(out.data(), &header, sizeof header);
  return out;
}

std::vector<std::byte> error_frame(FrameHeader header, const Status& status) {
  const std::string_view message = std::string_view(status.message()).substr(0, kMaxErrorBytes);
  ErrorPayload payload;
  payload.code = static_cast<std::uint16_t>(status.code());
  payload.message_bytes = static_cast<std::uint32_t>(message.size());
  header.type = static_cast<std::uint16_t>(FrameType::kError);
  return small_frame(header, SectionKind::kError, bytes_of(payload), std::as_bytes(std::span(message)));
}

void seal_crc(FrameHeader& header, std::span<const iovec> body) noexcept {
  header.flags |= kFrameHasCrc;
  header.crc32c = 0;
  std::uint32_t crc = crc32c(0, &header, sizeof header);
  for (const iovec& piece : body) crc = crc32c(crc, piece.iov_base, piece.iov_len);
  header.crc32c = crc;
}

}  // namespace sparserow::rpc

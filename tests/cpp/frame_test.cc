#include "rpc/wire/frame.h"
#include "rpc/server/reply_frames.h"
#include "rpc/wire/scaled_rows.h"

#include <doctest/doctest.h>

#include <cstring>
#include <functional>
#include <string>

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

// Bytes at an 8-byte boundary, exactly as long as they say, so that a sanitizer sees a read past the end.
struct Aligned {
  std::vector<std::uint64_t> words;
  explicit Aligned(std::size_t bytes) : words(bytes / 8) {}
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(words)); }
};

TableDescriptor descriptor(std::uint32_t n, std::uint32_t dim, Dtype dtype = Dtype::kFloat32, std::uint8_t flags = 0) {
  TableDescriptor table;
  table.table_id = 7;
  table.dim = dim;
  table.dtype = dtype;
  table.flags = flags;
  table.n = n;
  return table;
}

Aligned payload_of(const TableDescriptor& table, const TableLayout& layout) {
  Aligned payload(table_payload_bytes(table, layout));
  std::memcpy(payload.bytes().data(), &table, sizeof table);
  return payload;
}

Code parse_code(SectionKind kind, const TableDescriptor& table, std::size_t bytes) {
  Aligned payload(padded8(std::max(bytes, sizeof table)));
  std::memcpy(payload.bytes().data(), &table, sizeof table);
  return parse_table(kind, payload.bytes().first(bytes)).status().code();
}

std::vector<std::byte> sectioned(std::uint16_t kind, std::uint16_t flags, std::uint64_t payload_bytes,
                                 std::size_t present) {
  SectionHeader section;
  section.kind = kind;
  section.flags = flags;
  section.payload_bytes = payload_bytes;
  std::vector<std::byte> body(sizeof section + present);
  std::memcpy(body.data(), &section, sizeof section);
  return body;
}

}  // namespace

TEST_CASE("a header is refused by the field that is wrong") {
  const auto message = [](const std::function<void(FrameHeader&)>& change) {
    FrameHeader header;
    header.body_bytes = 64;
    header.section_count = 1;
    change(header);
    return check_header(header, 1024).message();
  };
  CHECK(message([](FrameHeader&) {}).empty());
  CHECK(message([](FrameHeader& h) { h.version = 2; }).find("header.version: 2") == 0);
  CHECK(message([](FrameHeader& h) { h.version = 0; }).find("header.version: 0") == 0);
  CHECK(message([](FrameHeader& h) { h.flags = 128; }).find("header.flags") == 0);
  CHECK(message([](FrameHeader& h) { h.body_bytes = 60; }).find("header.body_bytes: 60") == 0);
  CHECK(message([](FrameHeader& h) { h.body_bytes = 2048; }).find("header.body_bytes: 2048; at most 1024") == 0);
  CHECK(message([](FrameHeader& h) { h.section_count = 5; }).find("header.section_count: 5") == 0);
  CHECK(message([](FrameHeader& h) { h.crc32c = 1; }).find("header.crc32c") == 0);
}

TEST_CASE("a greeting has one version for ever, and a reply that of its request") {
  for (const FrameType type : {FrameType::kHello, FrameType::kHelloAck, FrameType::kError}) {
    CHECK(is_spoken(kGreetingVersion, type));
  }
  CHECK(is_spoken(kProtocolMin, FrameType::kPull));
  CHECK(is_spoken(kProtocolVersion, FrameType::kPull));
  CHECK_FALSE(is_spoken(kProtocolVersion + 1, FrameType::kPull));
  CHECK_FALSE(is_spoken(kProtocolVersion + 1, FrameType::kHello));
  FrameHeader request;
  request.version = kProtocolVersion;
  CHECK(reply_to(request, FrameType::kRows).version == kProtocolVersion);
  request.version = kProtocolVersion + 1;  // a client of a later build, whose HELLO is refused
  CHECK(reply_to(request, FrameType::kError).version == kGreetingVersion);
}

TEST_CASE("a peer speaks one version at least that this build speaks") {
  HelloPayload peer;
  CHECK(check_protocol(peer, "the shard", "this client").is_ok());
  peer.protocol_max = kProtocolVersion + 1;
  CHECK(check_protocol(peer, "the shard", "this client").is_ok());
  peer.protocol_min = kProtocolVersion + 1;
  CHECK(check_protocol(peer, "the shard", "this client").message() ==
        "protocol: the shard speaks 2 to 2, this client 1 to 1");
}

TEST_CASE("a conditional pull carries known versions, its reply positions that rise") {
  const auto asked = descriptor(3, 2, Dtype::kFloat32, kTableKnown | kTableVersions);
  auto keys = payload_of(asked, {.keys = true, .known = true});
  const auto view = parse_table(SectionKind::kTableKeys, keys.bytes());
  REQUIRE(view.is_ok());
  CHECK(view.value().known.size() == 3);
  CHECK(parse_code(SectionKind::kTableKeys, asked, table_payload_bytes(asked, {.keys = true})) ==
        Code::kInvalidArgument);
  CHECK(parse_code(SectionKind::kTableKeys, descriptor(3, 2, Dtype::kFloat32, kTableKnown), 88) ==
        Code::kInvalidArgument);  // no versions asked
  CHECK(layout_of(SectionKind::kTableGrads, kTableKnown | kTableVersions).status().code() == Code::kInvalidArgument);

  auto rows = payload_of(asked, {.positions = true, .rows = true, .versions = true});
  auto* positions = reinterpret_cast<std::uint32_t*>(rows.bytes().data() + sizeof(TableDescriptor));
  CHECK(!parse_table(SectionKind::kTableRows, rows.bytes()).is_ok());  // 0, 0, 0
  positions[1] = 4;
  positions[2] = 9;
  const auto reply = parse_table(SectionKind::kTableRows, rows.bytes());
  REQUIRE(reply.is_ok());
  CHECK(reply.value().positions[2] == 9);
  CHECK(reply.value().versions.size() == 3);
}

TEST_CASE("sections: unknown optional ones are skipped, required ones refused, lengths checked") {
  const auto first = [](const std::vector<std::byte>& body, std::uint32_t count) {
    return SectionReader(body, count).next();
  };
  const auto skipped = first(sectioned(99, 0, 8, 8), 1);
  REQUIRE(skipped.is_ok());
  CHECK(!skipped.value().has_value());
  CHECK(first(sectioned(99, kSectionRequired, 8, 8), 1).status().message().find("section.kind: 99") == 0);
  CHECK(!first(sectioned(1, 0, 16, 8), 1).is_ok());          // payload past the end
  CHECK(!first(sectioned(1, 0, 5, 5), 1).is_ok());           // padding past the end
  CHECK(!first(sectioned(1, 0, UINT64_MAX, 8), 1).is_ok());  // padding would overflow
  CHECK(!first(sectioned(1, 0, UINT64_MAX - 8, 8), 1).is_ok());
  CHECK(!first(sectioned(1, 4, 8, 8), 1).is_ok());      // unknown flag
  CHECK(!first(std::vector<std::byte>(8), 1).is_ok());  // truncated section header
  CHECK(!first(std::vector<std::byte>(8), 0).is_ok());  // bytes after the last section
  auto padded = sectioned(1, 0, 5, 8);
  CHECK(first(padded, 1).is_ok());
  padded.back() = std::byte{1};
  CHECK(first(padded, 1).status().message() == "section padding: not zero");
}

TEST_CASE("a table is read where it lies") {
  const auto table = descriptor(3, 5, Dtype::kBFloat16, kTableVersions | kTableFound);
  auto payload = payload_of(table, {.rows = true, .versions = true, .found = true});
  CHECK(payload.bytes().size() == 40 + 32 + 24 + 8);
  payload.bytes()[40 + 32] = std::byte{9};       // first version
  payload.bytes()[40 + 32 + 24] = std::byte{1};  // first found
  const auto view = parse_table(SectionKind::kTableRows, payload.bytes());
  REQUIRE(view.is_ok());
  CHECK(view.value().keys.empty());
  CHECK(view.value().rows.size() == 30);
  CHECK(view.value().versions[0] == 9);
  CHECK(view.value().found[0] == 1);
  payload.bytes()[40 + 31] = std::byte{1};
  CHECK(parse_table(SectionKind::kTableRows, payload.bytes()).status().message() == "table padding: not zero");
}

TEST_CASE("exponents of sent rows are read, and those that cannot be are refused") {
  auto table = descriptor(2, 3, Dtype::kFloat16, kTableExponents);
  auto payload = payload_of(table, {.keys = true, .exponents = true, .rows = true});
  CHECK(payload.bytes().size() == 40 + 16 + 8 + 16);
  const auto put = [&payload](std::size_t at, int value) {
    payload.bytes()[40 + 16 + at] = static_cast<std::byte>(static_cast<std::int8_t>(value));
    return parse_table(SectionKind::kTableGrads, payload.bytes());
  };
  for (const int exponent : {kLeastExponent, -1, 0, 14, kMostExponent}) {
    const auto view = put(1, exponent);
    REQUIRE(view.is_ok());
    CHECK(view.value().exponents.size() == 2);
    CHECK(view.value().exponents[1] == exponent);
  }
  for (const int exponent : {kLeastExponent - 1, kMostExponent + 1, -128}) {
    CHECK(put(1, exponent).status().message() == "table.exponents: allowed: [-113, 126]");
  }
  CHECK(put(1, 0).is_ok());
  CHECK(put(2, 1).status().message() == "table padding: not zero");
}

TEST_CASE("a table is refused before a byte past its section is used") {
  const auto kind = SectionKind::kTableGrads;
  CHECK(parse_code(kind, descriptor(1, 4), 40 + 8 + 16) == Code::kOk);
  CHECK(parse_code(kind, descriptor(1, 4), 40 + 8 + 8) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4), 40 + 8 + 24) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(UINT32_MAX, kMaxDim), 64) == Code::kInvalidArgument);  // n * dim is huge
  CHECK(parse_code(kind, descriptor(0, 0), 40) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(0, kMaxDim + 1), 40) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4, static_cast<Dtype>(3)), 64) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4, Dtype::kFloat32, kTableFound), 64) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4), 39) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4, Dtype::kFloat16, kTableExponents), 40 + 8 + 8 + 8) == Code::kOk);
  CHECK(parse_code(kind, descriptor(1, 4, Dtype::kFloat16), 40 + 8 + 8) == Code::kInvalidArgument);
  CHECK(parse_code(kind, descriptor(1, 4, Dtype::kFloat32, kTableExponents), 40 + 8 + 8 + 16) ==
        Code::kInvalidArgument);
  CHECK(parse_code(SectionKind::kTableKeys, descriptor(1, 4, Dtype::kFloat16, kTableExponents), 40 + 8) ==
        Code::kInvalidArgument);
  auto reserved = descriptor(1, 4);
  reserved.reserved3 = 1;
  CHECK(parse_code(kind, reserved, 64) == Code::kInvalidArgument);
  CHECK(parse_code(SectionKind::kAck, descriptor(1, 4), 64) == Code::kInvalidArgument);
}

TEST_CASE("an error travels with its code and text") {
  FrameHeader header;
  header.request_id = 5;
  header.flags = kFrameHasCrc;
  const auto frame = error_frame(header, Status(Code::kFenced, "worker 3 is over"));
  FrameHeader got;
  std::memcpy(&got, frame.data(), sizeof got);
  REQUIRE(check_header(got, 1u << 20).is_ok());
  const auto body = std::span(frame).subspan(sizeof got);
  CHECK(got.request_id == 5);
  CHECK(check_crc(got, body).is_ok());
  SectionReader sections(body, got.section_count);
  auto section = sections.next();
  REQUIRE(section.is_ok());
  const Status status = parse_error(section.value()->payload);
  CHECK(status.code() == Code::kFenced);
  CHECK(status.message() == "worker 3 is over");
  auto corrupt = frame;
  corrupt[70] ^= std::byte{1};
  CHECK(check_crc(got, std::span(corrupt).subspan(sizeof got)).code() == Code::kDataLoss);
}

TEST_CASE("HELLO, SCAN and SCAN_PAGE payloads are checked for their length") {
  HelloPayload hello;
  CHECK(parse_hello(bytes_of(hello)).is_ok());
  hello.token_bytes = 1;
  CHECK(!parse_hello(bytes_of(hello)).is_ok());
  hello.token_bytes = 0;
  hello.magic = 1;
  CHECK(!parse_hello(bytes_of(hello)).is_ok());
  ScanPayload scan;
  CHECK(parse_scan(bytes_of(scan)).is_ok());
  CHECK(!parse_scan(bytes_of(scan).first(16)).is_ok());
  ScanPagePayload page;
  CHECK(parse_scan_page(bytes_of(page)).is_ok());
  page.n = 1;
  CHECK(!parse_scan_page(bytes_of(page)).is_ok());
  page.n = UINT32_MAX;
  page.dim = UINT32_MAX;
  CHECK(!parse_scan_page(bytes_of(page)).is_ok());
}

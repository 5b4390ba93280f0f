// ReplyReader without a socket: replies are read right however their bytes are cut, and what was not asked for is
// refused.
#include "rpc/client/reply_reader.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>

#include "rpc/wire/crc32c.h"

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

constexpr std::uint32_t kDim = 3;

std::uint32_t seed() {
  static const std::uint32_t drawn = [] {
    const char* given = std::getenv("SPARSEROW_TEST_SEED");
    const auto value = given != nullptr ? static_cast<std::uint32_t>(std::stoul(given)) : std::random_device{}();
    std::cout << "reply_reader_test: SPARSEROW_TEST_SEED=" << value << "\n";
    return value;
  }();
  return drawn;
}

// The bytes of a body, padded after each part.
struct BodyBytes {
  std::vector<std::byte> bytes;

  template <class T>
  void part(const std::vector<T>& values) {
    const auto raw = std::as_bytes(std::span(values));
    bytes.insert(bytes.end(), raw.begin(), raw.end());
    bytes.resize(padded8(bytes.size()));
  }
  template <class T>
  void one(const T& value) {
    part(std::vector<T>{value});
  }
};

TableDescriptor described(std::uint32_t n, std::uint8_t flags = 0) {
  TableDescriptor descriptor;
  descriptor.table_id = 9;
  descriptor.schema_version = 2;
  descriptor.dim = kDim;
  descriptor.n = n;
  descriptor.flags = flags;
  return descriptor;
}

// A ROWS reply with one table, whose row i has the values 10 * i + column.
std::vector<std::byte> rows_reply(const TableDescriptor& descriptor, const std::vector<std::uint32_t>& positions,
                                  bool has_crc) {
  BodyBytes payload;
  payload.one(descriptor);
  if ((descriptor.flags & kTableKnown) != 0) payload.part(positions);
  std::vector<float> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
  for (std::uint32_t i = 0; i < descriptor.n; ++i) {
    const std::uint32_t at = (descriptor.flags & kTableKnown) != 0 ? positions[i] : i;
    for (std::uint32_t column = 0; column < kDim; ++column) rows.push_back(static_cast<float>(10 * at + column));
    versions.push_back(100 + at);
    found.push_back(static_cast<std::uint8_t>(at % 2));
  }
  payload.part(rows);
  if ((descriptor.flags & kTableVersions) != 0) payload.part(versions);
  if ((descriptor.flags & kTableFound) != 0) payload.part(found);
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kRows);
  std::vector<std::byte> frame = small_frame(header, SectionKind::kTableRows, payload.bytes, {});
  if (has_crc) {
    std::memcpy(&header, frame.data(), sizeof header);
    const iovec body{frame.data() + sizeof header, frame.size() - sizeof header};
    seal_crc(header, {&body, 1});
    std::memcpy(frame.data(), &header, sizeof header);
  }
  return frame;
}

std::vector<std::byte> pong() {
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kPong);
  return empty_frame(header);
}

// The memory of a caller, filled with what no reply has.
struct Sink {
  std::vector<float> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
  std::vector<std::uint8_t> changed;
  RowsSink sink;

  explicit Sink(const TableDescriptor& expected)
      : rows(std::size_t{expected.n} * kDim, -1.0f),
        versions(expected.n, 7),
        found(expected.n, 9),
        changed(expected.n) {
    sink = {expected, rows, versions, found, changed};
  }
  [[nodiscard]] bool has_row(std::uint32_t at) const {
    bool is_right = versions[at] == 100 + at && found[at] == at % 2;
    for (std::uint32_t column = 0; column < kDim; ++column) {
      is_right = is_right && rows[at * kDim + column] == static_cast<float>(10 * at + column);
    }
    return is_right;
  }
  [[nodiscard]] bool is_untouched(std::uint32_t at) const { return rows[at * kDim] == -1.0f && versions[at] == 7; }
};

// Gives bytes to a reader in runs of random lengths and counts the replies that ended.
struct Feeder {
  ReplyReader reader;
  std::mt19937 random;
  std::size_t longest;
  std::vector<RowsSink> sinks;
  bool collects = false;
  int ended = 0;
  std::size_t most_awaited = 0;

  Feeder(std::uint32_t from, std::size_t longest_run) : random(from), longest(longest_run) {}

  Status feed(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      std::size_t run = std::min<std::size_t>(bytes.size(), 1 + random() % longest);
      std::size_t taken = 0;
      for (const iovec& space : reader.space()) {
        const std::size_t part = std::min(space.iov_len, run);
        std::memcpy(space.iov_base, bytes.data() + taken, part);
        taken += part;
        run -= part;
      }
      REQUIRE(taken > 0);
      reader.filled(taken);
      bytes = bytes.subspan(taken);
      for (bool is_starved = false; !is_starved;) {
        const auto event = reader.next();
        if (!event.is_ok()) return event.status();
        if (event.value() == ReplyReader::Event::kHeader) {
          direct();
        } else if (event.value() == ReplyReader::Event::kEnd) {
          ++ended;
        } else {
          is_starved = true;
        }
      }
      const std::size_t awaited = reader.awaited();
      REQUIRE((awaited == 1 || awaited <= bytes.size()));  // else its owner would wait for ever
      most_awaited = std::max(most_awaited, awaited);
    }
    return Status::ok();
  }

 private:
  void direct() {
    if (collects) {
      reader.collect();
    } else if (!sinks.empty() && reader.header().type == static_cast<std::uint16_t>(FrameType::kRows)) {
      reader.read_rows(sinks);
    } else {
      reader.drop();
    }
  }
};

}  // namespace

TEST_CASE("rows reach their caller however the bytes are cut") {
  const std::uint32_t from = seed();
  for (std::uint32_t round = 0; round < 200; ++round) {
    const TableDescriptor descriptor = described(round % 40, kTableVersions | kTableFound);
    Sink sink(descriptor);
    Feeder feeder(from + round, 1 + (round * 37) % 500);
    feeder.sinks = {sink.sink};
    std::vector<std::byte> bytes = rows_reply(descriptor, {}, round % 2 == 0);
    const auto after = pong();
    bytes.insert(bytes.end(), after.begin(), after.end());
    REQUIRE(feeder.feed(bytes).is_ok());
    REQUIRE(feeder.ended == 2);
    for (std::uint32_t at = 0; at < descriptor.n; ++at) REQUIRE(sink.has_row(at));
  }
}

TEST_CASE("a large body is awaited in large parts") {
  const TableDescriptor descriptor = described(60'000, kTableVersions | kTableFound);
  Sink sink(descriptor);
  Feeder feeder(seed(), 90'000);
  feeder.sinks = {sink.sink};
  REQUIRE(feeder.feed(rows_reply(descriptor, {}, false)).is_ok());
  CHECK(feeder.ended == 1);
  CHECK(feeder.most_awaited >= 64u << 10);
  CHECK(feeder.reader.awaited() == 1);
  Feeder small(seed(), 500);
  REQUIRE(small.feed(rows_reply(described(40), {}, false)).is_ok());
  CHECK(small.most_awaited == 1);
}

TEST_CASE("a conditional reply touches the rows that it has and no other") {
  const std::uint8_t flags = kTableVersions | kTableFound | kTableKnown;
  Sink sink(described(6, flags));
  Feeder feeder(seed(), 50);
  feeder.sinks = {sink.sink};
  REQUIRE(feeder.feed(rows_reply(described(2, flags), {1, 4}, true)).is_ok());
  for (const std::uint32_t at : {0u, 2u, 3u, 5u}) CHECK((sink.is_untouched(at) && sink.changed[at] == 0));
  for (const std::uint32_t at : {1u, 4u}) CHECK((sink.has_row(at) && sink.changed[at] == 1));
}

TEST_CASE("positions that do not rise, or lie outside, change no row") {
  const std::uint8_t flags = kTableVersions | kTableFound | kTableKnown;
  for (const auto& positions : {std::vector<std::uint32_t>{4, 1}, {1, 1}, {1, 6}}) {
    Sink sink(described(6, flags));
    Feeder feeder(seed(), 50);
    feeder.sinks = {sink.sink};
    CHECK(feeder.feed(rows_reply(described(2, flags), positions, true)).code() == Code::kDataLoss);
    for (std::uint32_t at = 0; at < 6; ++at) CHECK(sink.is_untouched(at));
  }
}

TEST_CASE("a table that was not asked for is refused before a row is written") {
  const TableDescriptor asked = described(4, kTableVersions | kTableFound);
  const auto refused = [&](const TableDescriptor& sent) {
    Sink sink(asked);
    Feeder feeder(seed(), 64);
    feeder.sinks = {sink.sink};
    const Status status = feeder.feed(rows_reply(sent, {}, false));
    CHECK(sink.is_untouched(0));
    return status.code() == Code::kDataLoss;
  };
  TableDescriptor other_table = asked;
  other_table.table_id = 10;
  CHECK(refused(other_table));
  TableDescriptor other_schema = asked;
  other_schema.schema_version = 3;
  CHECK(refused(other_schema));
  CHECK(refused(described(5, asked.flags)));
  CHECK(refused(described(4, kTableVersions)));
}

TEST_CASE("more or fewer tables than asked for are refused") {
  const TableDescriptor descriptor = described(2, kTableVersions | kTableFound);
  Sink one(descriptor);
  Sink two(descriptor);
  Feeder fewer(seed(), 64);
  fewer.sinks = {one.sink, two.sink};
  CHECK(fewer.feed(rows_reply(descriptor, {}, false)).code() == Code::kDataLoss);
}

TEST_CASE("one changed bit of a reply with a checksum is found") {
  const TableDescriptor descriptor = described(4, kTableVersions | kTableFound);
  const std::vector<std::byte> whole = rows_reply(descriptor, {}, true);
  for (std::size_t at = sizeof(FrameHeader); at < whole.size(); ++at) {
    std::vector<std::byte> bytes = whole;
    bytes[at] ^= std::byte{4};
    Sink sink(descriptor);
    Feeder feeder(1, 64);
    feeder.sinks = {sink.sink};
    const Status status = feeder.feed(bytes);
    REQUIRE((!status.is_ok() || feeder.ended == 0));  // a length that grew waits for bytes that never come
  }
}

TEST_CASE("a reply that was abandoned anywhere touches nothing more, and the next one is read") {
  const TableDescriptor descriptor = described(8, kTableVersions | kTableFound);
  const std::vector<std::byte> whole = rows_reply(descriptor, {}, true);
  for (std::size_t at = 0; at < whole.size(); ++at) {
    Feeder feeder(1, 16);
    Sink next(descriptor);
    {
      Sink gone(descriptor);
      feeder.sinks = {gone.sink};
      REQUIRE(feeder.feed(std::span(whole).first(at)).is_ok());
      feeder.reader.abandon();
      feeder.sinks = {};
    }  // the memory of the first reply is gone: the sanitizer finds a write
    REQUIRE(feeder.feed(std::span(whole).subspan(at)).is_ok());
    feeder.sinks = {next.sink};
    REQUIRE(feeder.feed(whole).is_ok());
    REQUIRE(feeder.ended == 2);
    for (std::uint32_t row = 0; row < descriptor.n; ++row) REQUIRE(next.has_row(row));
  }
}

TEST_CASE("a body is collected whole, and a new connection forgets half a reply") {
  FrameHeader header;
  header.type = static_cast<std::uint16_t>(FrameType::kError);
  const std::vector<std::byte> error = error_frame(header, {Code::kNotFound, "no such table"});
  Feeder feeder(seed(), 10);
  feeder.collects = true;
  REQUIRE(feeder.feed(std::span(error).first(error.size() - 3)).is_ok());
  feeder.reader.reset();
  REQUIRE(feeder.feed(error).is_ok());
  CHECK(feeder.ended == 1);
  REQUIRE(feeder.reader.is_collected());
  SectionReader sections(feeder.reader.body(), feeder.reader.header().section_count);
  const auto section = sections.next();
  REQUIRE((section.is_ok() && section.value()));
  CHECK(parse_error(section.value()->payload).message() == "no such table");
}

// Rows that are looked at while their frame arrives: what is found must hold for the bytes that the request has.
#include "rpc/server/arriving_rows.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "util/finite.h"

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

struct BodyOfTables {
  std::vector<std::uint64_t> words;
  std::vector<std::span<std::byte>> rows;  // of each table

  explicit BodyOfTables(const std::vector<TableDescriptor>& tables, std::uint16_t kind = 0) {
    const auto layout = layout_of(SectionKind::kTableGrads, 0).value();
    std::vector<std::size_t> begins;
    for (const TableDescriptor& table : tables) {
      SectionHeader section;
      section.kind = kind != 0 ? kind : static_cast<std::uint16_t>(SectionKind::kTableGrads);
      section.payload_bytes = table_payload_bytes(table, layout);
      const std::size_t at = words.size() * 8;
      words.resize(words.size() + (sizeof section + padded8(section.payload_bytes)) / 8);
      std::memcpy(bytes().data() + at, &section, sizeof section);
      std::memcpy(bytes().data() + at + sizeof section, &table, sizeof table);
      begins.push_back(at + sizeof section + sizeof table + std::size_t{table.n} * 8);
    }
    for (std::size_t i = 0; i < tables.size(); ++i) {
      const std::size_t row_bytes = std::size_t{tables[i].n} * tables[i].dim * size_of(tables[i].dtype);
      rows.push_back(bytes().subspan(begins[i], row_bytes));
    }
  }
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(words)); }
};

TableDescriptor table(std::uint32_t n, std::uint32_t dim, Dtype dtype = Dtype::kFloat32) {
  TableDescriptor made;
  made.n = n;
  made.dim = dim;
  made.dtype = dtype;
  return made;
}

void put(std::span<std::byte> rows, std::size_t at, float value) {
  std::memcpy(rows.data() + at * sizeof value, &value, sizeof value);
}

// What is found of each table when the body arrives in parts of random lengths.
std::vector<bool> found(BodyOfTables& body, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  ArrivingRows arriving;
  for (std::size_t arrived = 0; arrived < body.bytes().size();) {
    arrived = std::min(body.bytes().size(), arrived + 1 + random() % (256u << 10));
    arriving.look(body.bytes().first(arrived));
  }
  std::vector<bool> each;
  for (const auto& rows : body.rows) each.push_back(arriving.are_finite(rows));
  return each;
}

}  // namespace

TEST_CASE("rows are finite when no part has NaN or an infinite value, wherever the parts end") {
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 random(seed);
    BodyOfTables body({table(3000, 16), table(1, 1), table(0, 8), table(9000, 7)});
    CHECK(found(body, seed) == std::vector<bool>{true, false, false, true});  // small ones are not noted
    for (const std::size_t hurt : {0u, 3u}) {
      const std::size_t floats = body.rows[hurt].size() / sizeof(float);
      const std::size_t places[] = {0, floats - 1, random() % floats};
      const float values[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                              -std::numeric_limits<float>::infinity()};
      for (const std::size_t at : places) {
        const float value = values[random() % 3];
        put(body.rows[hurt], at, value);
        CHECK(found(body, seed) == std::vector<bool>{hurt != 0, false, false, hurt != 3});
        put(body.rows[hurt], at, -std::numeric_limits<float>::max());
      }
    }
  }
}

TEST_CASE("bytes that are not the rows of one table are never told finite") {
  BodyOfTables body({table(3000, 16), table(9000, 7)});
  ArrivingRows arriving;
  arriving.look(body.bytes().first(body.bytes().size() - 8));
  CHECK(arriving.are_finite(body.rows[0]));
  CHECK_FALSE(arriving.are_finite(body.rows[1]));  // its end has not arrived
  arriving.look(body.bytes());
  CHECK(arriving.are_finite(body.rows[1]));
  CHECK_FALSE(arriving.are_finite(body.rows[0].subspan(4)));
  CHECK_FALSE(arriving.are_finite(body.rows[0].first(64)));
  CHECK_FALSE(arriving.are_finite(body.bytes()));
  const std::vector<std::byte> elsewhere(body.rows[0].begin(), body.rows[0].end());
  CHECK_FALSE(arriving.are_finite(elsewhere));
}

TEST_CASE("sections of other kinds, halves of floats and wrong heads are not looked at") {
  BodyOfTables keys({table(3000, 16)}, static_cast<std::uint16_t>(SectionKind::kTableKeys));
  CHECK(found(keys, 1) == std::vector<bool>{false});
  BodyOfTables halves({table(3000, 64, Dtype::kFloat16)});
  CHECK(found(halves, 1) == std::vector<bool>{false});
  for (const std::uint32_t n : {2999u, 3001u, ~0u}) {  // the head disagrees with the section's length
    BodyOfTables wrong({table(3000, 16)});
    std::memcpy(wrong.bytes().data() + sizeof(SectionHeader) + offsetof(TableDescriptor, n), &n, sizeof n);
    CHECK(found(wrong, 1) == std::vector<bool>{false});
  }
}

TEST_CASE("only requests that set rows or gradients by key are looked at") {
  FrameHeader header;
  header.step = kNoStep;
  header.type = static_cast<std::uint16_t>(FrameType::kCommit);
  CHECK(ArrivingRows::are_looked_at(header));
  header.step = 3;
  CHECK_FALSE(ArrivingRows::are_looked_at(header));
  header.type = static_cast<std::uint16_t>(FrameType::kAssign);
  CHECK(ArrivingRows::are_looked_at(header));
  header.type = static_cast<std::uint16_t>(FrameType::kPull);
  CHECK_FALSE(ArrivingRows::are_looked_at(header));
}

TEST_CASE("a value that is not finite is found at every place of any length") {
  std::vector<float> values(700, -std::numeric_limits<float>::max());
  for (std::size_t n = 0; n <= values.size(); n += n < 140 ? 1 : 37) {
    CHECK(all_finite(values.data(), n));
    for (std::size_t at = 0; at < n; ++at) {
      for (const float bad : {std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                              std::numeric_limits<float>::signaling_NaN(), -std::numeric_limits<float>::quiet_NaN()}) {
        const float before = std::exchange(values[at], bad);
        const bool is_found = !all_finite(values.data(), n);
        values[at] = before;
        REQUIRE(is_found);
      }
    }
  }
}

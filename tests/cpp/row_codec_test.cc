// The stored form of a row, byte by byte: what is on a disk today must be read by every later build.
#include "store/table/row_codec.h"

#include <doctest/doctest.h>

#include <cstring>
#include <string>
#include <vector>

#include "store/ssd/ssd_tier.h"

namespace sparserow {
namespace {

constexpr std::uint32_t kTable = 0x01020304;
constexpr std::uint64_t kKey = 0x1122334455667788;

std::string hex_of(std::span<const std::byte> bytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[static_cast<unsigned>(byte) >> 4];
    text += kDigits[static_cast<unsigned>(byte) & 15];
  }
  return text;
}

// A row of three bfloat16 columns (padded to 8 bytes) and two floats of state.
struct Sample {
  Sample() {
    data[0] = std::byte{0x80};
    data[1] = std::byte{0x3f};  // 1.0
    const float state[2] = {0.5f, -2.0f};
    std::memcpy(data + 8, state, sizeof state);
    row.set_version(0x0001000000000007);
    row.set_update_count(7);
  }
  std::byte data[16] = {};
  std::byte head[RowLayout::kHeadBytes] = {};
  RowRef row{data, head};
  RowCodec codec{kTable, 3, Dtype::kBFloat16, 2};
};

}  // namespace

TEST_CASE("golden bytes") {
  Sample sample;
  std::vector<std::byte> out(sample.codec.bytes());
  sample.codec.encode(kKey, sample.row, out.data());
  CHECK(hex_of(out) ==
        "e695880a"          // checksum
        "01010300"          // format 1, bfloat16, 3 columns
        "02000000"          // 2 floats of state
        "07000000"          // update count
        "0700000000000100"  // version
        "803f000000000000"  // weights
        "0000003f000000c0");
}

TEST_CASE("a decoded row is the encoded one") {
  Sample sample;
  std::vector<std::byte> out(sample.codec.bytes());
  sample.codec.encode(kKey, sample.row, out.data());
  const auto image = sample.codec.decode(kKey, out);
  REQUIRE(image.is_ok());
  CHECK(image.value().version == 0x0001000000000007);
  CHECK(image.value().update_count == 7);
  CHECK(std::memcmp(image.value().data, sample.data, sizeof sample.data) == 0);
}

TEST_CASE("what is not the row is refused") {
  Sample sample;
  std::vector<std::byte> good(sample.codec.bytes());
  sample.codec.encode(kKey, sample.row, good.data());
  for (std::size_t at = 0; at < good.size(); ++at) {
    std::vector<std::byte> bad = good;
    bad[at] ^= std::byte{0x10};
    CHECK(sample.codec.decode(kKey, bad).status().code() == Code::kDataLoss);
  }
  CHECK(sample.codec.decode(kKey + 1, good).status().code() == Code::kDataLoss);
  CHECK(sample.codec.decode(kKey, std::span(good).first(good.size() - 1)).status().code() == Code::kDataLoss);
  const RowCodec other_table(kTable + 1, 3, Dtype::kBFloat16, 2);
  CHECK(other_table.decode(kKey, good).status().code() == Code::kDataLoss);
  const RowCodec other_dtype(kTable, 3, Dtype::kFloat16, 2);
  CHECK(other_dtype.decode(kKey, good).status().message().find("another schema") != std::string::npos);
}

#if SPARSEROW_HAS_ROCKSDB
TEST_CASE("keys on the SSD are in order of slot, table and hash") {
  const SsdKey key = ssd_key_of_hash(0x0a0b, kTable, kKey);
  CHECK(parts_of(ssd_key(3, kTable, kKey)).hash == row_hash(kTable, kKey));
  CHECK(parts_of(ssd_key(3, kTable, kKey)).key() == kKey);
  CHECK(hex_of(std::as_bytes(std::span(key))) == "0a0b010203041122334455667788");
}
#endif

}  // namespace sparserow

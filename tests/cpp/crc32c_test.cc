#include "rpc/wire/crc32c.h"

#include <doctest/doctest.h>

#include <cstdio>
#include <random>
#include <string_view>
#include <vector>

using namespace sparserow::rpc;

TEST_CASE("known answers of RFC 3720, appendix B.4") {
  const std::vector<unsigned char> zeros(32, 0);
  const std::vector<unsigned char> ones(32, 0xff);
  CHECK(crc32c(0, zeros.data(), zeros.size()) == 0x8a9136aau);
  CHECK(crc32c(0, ones.data(), ones.size()) == 0x62a8ab43u);
  std::vector<unsigned char> rising(32);
  for (std::size_t i = 0; i < rising.size(); ++i) rising[i] = static_cast<unsigned char>(i);
  CHECK(crc32c(0, rising.data(), rising.size()) == 0x46dd794eu);
  CHECK(crc32c_portable(0, rising.data(), rising.size()) == 0x46dd794eu);
  constexpr std::string_view kDigits = "123456789";
  CHECK(crc32c(0, kDigits.data(), kDigits.size()) == 0xe3069283u);
}

TEST_CASE("both forms agree for every length, alignment and split") {
  const std::uint64_t seed = std::random_device{}();
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  std::mt19937_64 random(seed);
  std::vector<unsigned char> bytes(512);
  for (auto& byte : bytes) byte = static_cast<unsigned char>(random());
  for (int round = 0; round < 2000; ++round) {
    const std::size_t begin = random() % 16;
    const std::size_t count = random() % (bytes.size() - begin);
    const std::size_t split = count == 0 ? 0 : random() % count;
    const unsigned char* at = bytes.data() + begin;
    const std::uint32_t whole = crc32c(0, at, count);
    CHECK(whole == crc32c_portable(0, at, count));
    CHECK(whole == crc32c(crc32c(0, at, split), at + split, count - split));
  }
}

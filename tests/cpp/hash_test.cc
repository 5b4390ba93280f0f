// Golden values: the hash decides where stored rows live, so it can never change under stored data.
#include "util/hash.h"

#include <doctest/doctest.h>

#include <random>

namespace sparserow {

TEST_CASE("the hash of a row is the library's") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  for (int i = 0; i < 100'000; ++i) {
    const auto table_id = static_cast<std::uint32_t>(random() >> (random() % 33 + 31));
    const std::uint64_t key = random() >> random() % 64;
    REQUIRE(row_hash(table_id, key) == XXH3_64bits_withSeed(&key, sizeof key, table_id));
  }
}

TEST_CASE("row_hash has its golden values") {
  CHECK(row_hash(0x1u, 0ull) == 0x9e51ad6d2f3e695cull);
  CHECK(row_hash(0x1u, 1ull) == 0x85671091eda75eb5ull);
  CHECK(row_hash(0x7u, 42ull) == 0xb117e48ca46dc725ull);
  CHECK(row_hash(0xffffffffu, 18446744073709551615ull) == 0x77bba92baed59fb2ull);
  CHECK(row_hash(0x12345678u, 123456789012345ull) == 0x95369c7e29038a64ull);
  CHECK(id_of_name("ads/user_id") == 0x4ea8d181u);
}

TEST_CASE("key_of_hash undoes row_hash") {
  for (const std::uint32_t table_id : {0u, 1u, 77u, ~0u}) {
    for (std::uint64_t i = 0; i < 10'000; ++i) {
      const std::uint64_t key = i < 100 ? i : i < 200 ? ~i : i * 0x9e3779b97f4a7c15ull;
      REQUIRE(key_of_hash(table_id, row_hash(table_id, key)) == key);
    }
  }
}

TEST_CASE("slot_of takes the top bits") {
  CHECK(slot_of(0xffffffffffffffffull, 16384) == 16383);
  CHECK(slot_of(0x0003ffffffffffffull, 16384) == 0);
  CHECK(slot_of(0x8000000000000000ull, 2) == 1);
  CHECK(slot_of(0xffffull << 48, 65536) == 65535);
}

}  // namespace sparserow

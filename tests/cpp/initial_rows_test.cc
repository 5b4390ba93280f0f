#include "store/table/initial_rows.h"

#include <doctest/doctest.h>

#include <random>
#include <vector>

namespace sparserow {
namespace {

TEST_CASE("uniform initial rows have the same bits with every instruction set, and stay within their bounds") {
  const unsigned seed = std::random_device{}();
  MESSAGE("seed " << seed);
  std::mt19937_64 random(seed);
  for (const std::uint32_t dim : {1u, 7u, 8u, 17u, 64u, 129u}) {
    TableSchema schema;
    schema.dim = dim;
    schema.seed = random();
    schema.init = {.kind = InitKind::kUniform, .a = -0.05f, .b = 0.07f};
    for (int each = 0; each < 200; ++each) {
      const std::uint64_t key = random();
      std::vector<float> expected(dim);
      InitialRows(schema, Isa::kBaseline).fill(key, expected.data());
      for (const float value : expected) REQUIRE((value >= -0.05f && value < 0.07f));
      for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
        if (!is_supported(isa)) continue;
        std::vector<float> row(dim + 1, 9.0f);
        InitialRows(schema, isa).fill(key, row.data());
        REQUIRE(row.back() == 9.0f);
        row.pop_back();
        REQUIRE(row == expected);
      }
    }
  }
}

}  // namespace
}  // namespace sparserow

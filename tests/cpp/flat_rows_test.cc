// Rows in flat arrays change as rows of a store do, bit for bit.
#include "commit/flat_rows.h"

#include <doctest/doctest.h>

#include <vector>

#include "store/store.h"

using namespace sparserow;
using namespace sparserow::rpc;

namespace {

constexpr std::uint32_t kDim = 3;
constexpr std::uint64_t kRows = 5;

TableSchema schema_of(OptimizerKind kind) {
  TableSchema schema;
  schema.id = 7;
  schema.name = "space/table";
  schema.dim = kDim;
  schema.seed = 11;
  schema.init = {InitKind::kNormal, 0.0f, 1.0f};
  schema.optimizer.kind = kind;
  if (kind == OptimizerKind::kAdam) schema.optimizer.eps = 1e-8f;
  if (kind == OptimizerKind::kFtrl) schema.optimizer.l1 = 0.5f;
  return schema;
}

struct Rows {
  explicit Rows(const FlatRows& flat)
      : weights(kRows * kDim), state(kRows * flat.state_floats()), update_counts(kRows) {
    std::vector<std::uint64_t> keys{0, 1, 2, 3, 4};
    flat.fill_initial(keys, weights.data());
    flat.fill_state(kRows, weights.data(), state.data());
  }
  FlatArrays arrays() { return {weights.data(), state.data(), update_counts.data(), kRows}; }

  std::vector<float> weights;
  std::vector<float> state;
  std::vector<std::uint32_t> update_counts;
};

}  // namespace

TEST_CASE("rows of one worker are those of a store") {
  for (const auto kind : {OptimizerKind::kSgd, OptimizerKind::kAdagrad, OptimizerKind::kRowWiseAdagrad,
                          OptimizerKind::kAdam, OptimizerKind::kRmsprop, OptimizerKind::kAdadelta, OptimizerKind::kLion,
                          OptimizerKind::kLamb, OptimizerKind::kFtrl}) {
    const auto flat = FlatRows::create(schema_of(kind));
    REQUIRE(flat.is_ok());
    Rows rows(*flat.value());
    auto store = Store::create({});
    REQUIRE(store.is_ok());
    REQUIRE(store.value()->create_table(schema_of(kind)).is_ok());
    const std::vector<std::uint64_t> keys{3, 1};
    const std::vector<float> grads{0.1f, -0.2f, 0.3f, 4.0f, 5.0f, -6.0f};
    for (int step = 0; step < 4; ++step) {
      const GradBlock block{.table_id = 7, .dim = kDim, .lr = 0.1f, .keys = keys, .grads = grads.data()};
      REQUIRE(flat.value()->apply({&block, 1}, 1, false, 0.1f, rows.arrays()).is_ok());
      REQUIRE(store.value()->apply(7, keys, grads.data(), {.lr = 0.1f}).is_ok());
    }
    std::vector<float> wanted(kRows * kDim);
    const std::vector<std::uint64_t> all{0, 1, 2, 3, 4};
    REQUIRE(store.value()->pull(7, all, Dtype::kFloat32, reinterpret_cast<std::byte*>(wanted.data())).is_ok());
    CHECK(rows.weights == wanted);
    CHECK(rows.update_counts == std::vector<std::uint32_t>{0, 4, 0, 4, 0});
  }
}

TEST_CASE("gradients of several workers are summed in float64") {
  const auto flat = FlatRows::create(schema_of(OptimizerKind::kSgd));
  REQUIRE(flat.is_ok());
  Rows rows(*flat.value());
  const std::vector<float> before = rows.weights;
  const std::vector<std::uint64_t> key{2};
  const std::vector<std::uint64_t> none;
  const std::vector<float> large{1e8f, 1e8f, 1e8f};
  const std::vector<float> small{1.0f, 1.0f, 1.0f};
  const std::vector<float> opposite{-1e8f, -1e8f, -1e8f};
  const std::vector<GradBlock> blocks{{.dim = kDim, .keys = key, .grads = large.data()},
                                      {.dim = kDim, .keys = key, .grads = small.data()},
                                      {.dim = kDim, .keys = none, .grads = nullptr},
                                      {.dim = kDim, .keys = key, .grads = opposite.data()}};
  REQUIRE(flat.value()->apply(blocks, 4, false, 1.0f, rows.arrays()).is_ok());
  for (std::uint32_t c = 0; c < kDim; ++c) CHECK(rows.weights[2 * kDim + c] == before[2 * kDim + c] - 0.25f);
  CHECK(rows.update_counts[2] == 1);
}

TEST_CASE("a row that is not there is refused before anything changes") {
  const auto flat = FlatRows::create(schema_of(OptimizerKind::kSgd));
  REQUIRE(flat.is_ok());
  Rows rows(*flat.value());
  const std::vector<float> before = rows.weights;
  const std::vector<std::uint64_t> keys{1, kRows};
  const std::vector<float> grads(2 * kDim, 1.0f);
  const GradBlock block{.dim = kDim, .keys = keys, .grads = grads.data()};
  CHECK(flat.value()->apply({&block, 1}, 1, false, 1.0f, rows.arrays()).code() == Code::kInvalidArgument);
  CHECK(rows.weights == before);
  TableSchema half = schema_of(OptimizerKind::kSgd);
  half.dtype = Dtype::kBFloat16;
  CHECK(FlatRows::create(half).status().code() == Code::kInvalidArgument);
}

// Kernels: equal bits on every instruction set, stochastic rounding without bias, order within a group.
// Their arithmetic is compared with torch.optim in tests/contract/test_optimizers.py.
#include "optim/optimizer.h"

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace sparserow {
namespace {

std::vector<OptimizerSpec> specs() {
  const OptimizerSpec sgd{.kind = OptimizerKind::kSgd, .weight_decay = 0.01f};
  const OptimizerSpec momentum{.kind = OptimizerKind::kSgd, .momentum = 0.9f, .dampening = 0.1f};
  const OptimizerSpec nesterov{.kind = OptimizerKind::kSgd, .momentum = 0.9f, .nesterov = true};
  const OptimizerSpec adagrad{.kind = OptimizerKind::kAdagrad, .initial_accumulator = 0.1f};
  const OptimizerSpec forgets{
      .kind = OptimizerKind::kAdagrad, .weight_decay = 0.01f, .decoupled = true, .accumulator_decay = 0.9f};
  const OptimizerSpec rowwise{.kind = OptimizerKind::kRowWiseAdagrad, .weight_decay = 0.001f};
  const OptimizerSpec adam{.kind = OptimizerKind::kAdam, .eps = 1e-8f};
  const OptimizerSpec amsgrad{
      .kind = OptimizerKind::kAdam, .weight_decay = 0.01f, .decoupled = true, .eps = 1e-8f, .amsgrad = true};
  const OptimizerSpec rmsprop{.kind = OptimizerKind::kRmsprop, .eps = 1e-8f};
  const OptimizerSpec with_momentum{.kind = OptimizerKind::kRmsprop, .momentum = 0.9f, .eps = 1e-8f};
  const OptimizerSpec centered{.kind = OptimizerKind::kRmsprop, .eps = 1e-8f, .centered = true};
  const OptimizerSpec both{.kind = OptimizerKind::kRmsprop, .momentum = 0.9f, .eps = 1e-8f, .centered = true};
  const OptimizerSpec adadelta{.kind = OptimizerKind::kAdadelta, .weight_decay = 0.01f, .eps = 1e-6f};
  const OptimizerSpec lion{.kind = OptimizerKind::kLion, .weight_decay = 0.1f, .decoupled = true, .beta2 = 0.99f};
  const OptimizerSpec lamb{.kind = OptimizerKind::kLamb, .weight_decay = 0.1f, .decoupled = true, .eps = 1e-6f};
  const OptimizerSpec ftrl{.kind = OptimizerKind::kFtrl, .weight_decay = 0.01f, .l1 = 0.2f, .l2 = 0.1f};
  const OptimizerSpec group{.kind = OptimizerKind::kFtrl, .l1 = 0.1f, .l2 = 0.1f, .group_lasso = 0.2f};
  return {sgd,           momentum, nesterov, adagrad,  forgets, rowwise, adam, amsgrad, rmsprop,
          with_momentum, centered, both,     adadelta, lion,    lamb,    ftrl, group};
}

TableSchema schema_of(std::uint32_t dim, Dtype dtype, const OptimizerSpec& spec) {
  return {.id = 9, .name = "n/t", .dim = dim, .dtype = dtype, .seed = 4, .init = {}, .optimizer = spec};
}

struct Row {
  std::vector<std::byte> weights;
  std::vector<float> state;
};

Row make_row(const TableSchema& schema, const Optimizer& optimizer, float start) {
  Row row{std::vector<std::byte>(schema.dim * size_of(schema.dtype)), std::vector<float>(optimizer.state_floats())};
  const std::vector<float> weights(schema.dim, start);
  convert_from_float(schema.dtype, weights.data(), row.weights.data(), schema.dim);
  optimizer.init_state(row.weights.data(), row.state.data());
  return row;
}

TEST_CASE("every instruction set gives the same bits") {
  for (const Isa isa : {Isa::kAvx2, Isa::kAvx512}) {
    if (!is_supported(isa)) {
      MESSAGE("not on this machine: instruction set " << static_cast<int>(isa));
      continue;
    }
    for (const OptimizerSpec& spec : specs()) {
      for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
        for (const std::uint32_t dim : {1u, 3u, 16u, 17u, 64u, 130u}) {
          const TableSchema schema = schema_of(dim, dtype, spec);
          const auto plain = make_optimizer(schema, Isa::kBaseline);
          const auto wide = make_optimizer(schema, isa);
          Row a = make_row(schema, *plain, 0.5f), b = make_row(schema, *wide, 0.5f);
          std::mt19937 random(dim);
          std::normal_distribution<float> normal(0.0f, 0.3f);
          std::vector<float> grad(dim);
          for (std::uint32_t step = 1; step <= 40; ++step) {
            for (float& value : grad) value = normal(random);
            const RowUpdate first{a.weights.data(), a.state.data(), grad.data(), 77, step};
            const RowUpdate second{b.weights.data(), b.state.data(), grad.data(), 77, step};
            plain->apply({&first, 1}, 0.05f, 0.5f);
            wide->apply({&second, 1}, 0.05f, 0.5f);
          }
          REQUIRE(a.weights == b.weights);
          REQUIRE(
              (a.state.empty() || std::memcmp(a.state.data(), b.state.data(), a.state.size() * sizeof(float)) == 0));
        }
      }
    }
  }
}

TEST_CASE("no optimizer has more state for a column than pages of rows expect") {
  for (const OptimizerSpec& spec : specs()) {
    for (const std::uint32_t dim : {1u, 64u}) {
      CHECK(make_optimizer(schema_of(dim, Dtype::kFloat32, spec))->state_floats() <= kMostStatePerColumn * dim);
    }
  }
}

TEST_CASE("a group is applied in order: the second update of a row sees the first") {
  for (const OptimizerSpec& spec : specs()) {
    const TableSchema schema = schema_of(16, Dtype::kFloat32, spec);
    const auto optimizer = make_optimizer(schema);
    Row together = make_row(schema, *optimizer, 1.0f), apart = make_row(schema, *optimizer, 1.0f);
    const std::vector<float> first(16, 0.25f), second(16, -1.5f);
    const RowUpdate pair[] = {{together.weights.data(), together.state.data(), first.data(), 1, 1},
                              {together.weights.data(), together.state.data(), second.data(), 1, 2}};
    optimizer->apply(pair, 0.1f, 1.0f);
    const RowUpdate one{apart.weights.data(), apart.state.data(), first.data(), 1, 1};
    const RowUpdate two{apart.weights.data(), apart.state.data(), second.data(), 1, 2};
    optimizer->apply({&one, 1}, 0.1f, 1.0f);
    optimizer->apply({&two, 1}, 0.1f, 1.0f);
    CHECK(together.weights == apart.weights);
    CHECK(together.state == apart.state);
  }
}

float stored_value(const Row& row, Dtype dtype, std::uint32_t column) {
  float value = 0;
  convert_to_float(dtype, row.weights.data() + column * size_of(dtype), &value, 1);
  return value;
}

// Rows of a range of weights, with some that are 0, after some training.
Row make_trained_row(const TableSchema& schema, const Optimizer& optimizer, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, 0.3f);
  Row row = make_row(schema, optimizer, 0.0f);
  std::vector<float> weights(schema.dim), grad(schema.dim);
  for (std::uint32_t i = 0; i < schema.dim; ++i) weights[i] = i % 3 == 0 ? 0.0f : normal(random);
  convert_from_float(schema.dtype, weights.data(), row.weights.data(), schema.dim);
  optimizer.init_state(row.weights.data(), row.state.data());
  for (std::uint32_t step = 1; step <= 10; ++step) {
    for (float& value : grad) value = normal(random);
    const RowUpdate update{row.weights.data(), row.state.data(), grad.data(), 5, step};
    optimizer.apply({&update, 1}, 0.05f, 1.0f);
  }
  return row;
}

TEST_CASE("FTRL: a gradient of zero changes no bit, after a creation, a step, and an assignment") {
  for (const float group_lasso : {0.0f, 0.2f}) {
    for (const Dtype dtype : {Dtype::kFloat32, Dtype::kBFloat16, Dtype::kFloat16}) {
      for (const std::uint32_t dim : {1u, 17u, 64u}) {
        const OptimizerSpec spec{.kind = OptimizerKind::kFtrl, .l1 = 0.2f, .l2 = 0.1f, .group_lasso = group_lasso};
        const TableSchema schema = schema_of(dim, dtype, spec);
        const auto optimizer = make_optimizer(schema);
        std::mt19937 random(dim);
        for (const bool is_assigned : {false, true}) {
          Row row = make_trained_row(schema, *optimizer, random);
          if (is_assigned) {
            std::vector<float> weights(dim, 0.0f);
            for (std::uint32_t i = 0; i < dim; i += 2) weights[i] = 0.25f * static_cast<float>(i + 1);
            convert_from_float(dtype, weights.data(), row.weights.data(), dim);
            optimizer->follow_weights(row.weights.data(), row.state.data());
          }
          const std::vector<std::byte> before = row.weights;
          const std::vector<float> none(dim, 0.0f);
          for (const float lr : {0.05f, 0.5f, 0.0f, 0.001f}) {
            const RowUpdate update{row.weights.data(), row.state.data(), none.data(), 5, 11};
            optimizer->apply({&update, 1}, lr, 1.0f);
            REQUIRE(row.weights == before);
          }
        }
      }
    }
  }
}

TEST_CASE("FTRL: what an assigned row was before has no part in whether its zeros stay") {
  const OptimizerSpec spec{.kind = OptimizerKind::kFtrl, .l1 = 1.0f};
  const TableSchema schema = schema_of(1, Dtype::kFloat32, spec);
  const auto optimizer = make_optimizer(schema);
  for (const bool is_followed : {false, true}) {
    Row row = make_row(schema, *optimizer, 0.0f);
    const float push = -0.9f, small = -0.2f;  // together beyond l1
    const RowUpdate first{row.weights.data(), row.state.data(), &push, 5, 1};
    optimizer->apply({&first, 1}, 0.1f, 1.0f);
    CHECK(stored_value(row, Dtype::kFloat32, 0) == 0.0f);
    if (is_followed) optimizer->follow_weights(row.weights.data(), row.state.data());
    const RowUpdate second{row.weights.data(), row.state.data(), &small, 5, 2};
    optimizer->apply({&second, 1}, 0.1f, 1.0f);
    CHECK((stored_value(row, Dtype::kFloat32, 0) == 0.0f) == is_followed);
  }
}

// SGD with lr = 1 moves a weight from 0 to -grad: its stored mean over many keys must be -grad, although
// -grad lies between two representable values; and a stored value is always one of these two.
TEST_CASE("stochastic rounding has no bias and never leaves the two neighbours") {
  constexpr std::uint32_t kDim = 64, kKeys = 4000;
  struct Case {
    Dtype dtype;
    float value, low, high;
  };
  const Case cases[] = {
      {Dtype::kBFloat16, 1.001f, 1.0f, 1.0078125f},
      {Dtype::kBFloat16, 1e-40f, 9.1835496e-41f, 1.8367099e-40f},
      {Dtype::kFloat16, 1.0003f, 1.0f, 1.0009765625f},
      {Dtype::kFloat16, 3.1e-5f, 520 * 0x1p-24f, 521 * 0x1p-24f},  // among the subnormals of float16
      {Dtype::kFloat16, 2e-8f, 0.0f, 0x1p-24f},
  };
  for (const Case& c : cases) {
    for (const float sign : {1.0f, -1.0f}) {
      const TableSchema schema = schema_of(kDim, c.dtype, OptimizerSpec{});
      const auto optimizer = make_optimizer(schema);
      const std::vector<float> grad(kDim, -sign * c.value);
      double sum = 0;
      for (std::uint64_t key = 0; key < kKeys; ++key) {
        Row row = make_row(schema, *optimizer, 0.0f);
        const RowUpdate update{row.weights.data(), row.state.data(), grad.data(), key, 1};
        optimizer->apply({&update, 1}, 1.0f, 1.0f);
        for (std::uint32_t column = 0; column < kDim; ++column) {
          const float value = sign * stored_value(row, c.dtype, column);
          REQUIRE((value == doctest::Approx(c.low).epsilon(1e-6) || value == doctest::Approx(c.high).epsilon(1e-6)));
          sum += value;
        }
      }
      const double unit = static_cast<double>(c.high) - c.low;
      const double deviations = (sum / (kDim * kKeys) - c.value) / (0.5 * unit / std::sqrt(double{kDim} * kKeys));
      CAPTURE(c.value);
      CHECK(std::abs(deviations) < 5.0);
    }
  }
}

TEST_CASE("values that the stored dtype has are stored exactly, NaN and infinity too") {
  for (const Dtype dtype : {Dtype::kBFloat16, Dtype::kFloat16}) {
    const TableSchema schema = schema_of(1, dtype, OptimizerSpec{});
    const auto optimizer = make_optimizer(schema);
    for (const float value : {0.0f, 1.0f, -2.5f, 0x1p-14f, -0x1p-20f, 1024.0f, INFINITY, -INFINITY}) {
      for (std::uint64_t key = 0; key < 64; ++key) {
        Row row = make_row(schema, *optimizer, 0.0f);
        const float grad = -value;
        const RowUpdate update{row.weights.data(), row.state.data(), &grad, key, 1};
        optimizer->apply({&update, 1}, 1.0f, 1.0f);
        REQUIRE(stored_value(row, dtype, 0) == value);
      }
    }
    Row row = make_row(schema, *optimizer, 0.0f);
    const float grad = NAN;
    const RowUpdate update{row.weights.data(), row.state.data(), &grad, 1, 1};
    optimizer->apply({&update, 1}, 1.0f, 1.0f);
    CHECK(std::isnan(stored_value(row, dtype, 0)));
  }
}

}  // namespace
}  // namespace sparserow

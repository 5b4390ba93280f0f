// What a table is: fixed at creation, recorded by the coordinator, checked by every shard.
#pragma once

#include <cstdint>
#include <string>

#include "util/dtype.h"
#include "util/status.h"

namespace sparserow {

// Values of both enums are part of the wire contract.
enum class InitKind : std::uint8_t { kConstant = 0, kUniform = 1, kNormal = 2, kXavierUniform = 3, kXavierNormal = 4 };
enum class OptimizerKind : std::uint8_t { kSgd = 0, kAdagrad = 1, kRowWiseAdagrad = 2, kAdam = 3 };

// constant: value a. uniform: [a, b). normal: mean a, standard deviation b.
// xavier_*: gain a, with fan_in = rows (b) and fan_out = dim (Glorot & Bengio 2010, as torch.nn.init).
struct InitSpec {
  InitKind kind = InitKind::kConstant;
  float a = 0.0f;
  float b = 0.0f;
  bool operator==(const InitSpec&) const = default;
};

// Hyper-parameters; the learning rate is not here, it travels with each commit.
// Fields that a kind does not use must keep their defaults.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kSgd;
  float momentum = 0.0f;             // sgd, [0, 1)
  float dampening = 0.0f;            // sgd, [0, 1]
  bool nesterov = false;             // sgd; needs momentum > 0 and dampening == 0
  float weight_decay = 0.0f;         // all kinds, >= 0 (L2, added to the gradient)
  float eps = 1e-10f;                // adagrad, rowwise_adagrad (1e-10), adam (1e-8); > 0
  float initial_accumulator = 0.0f;  // adagrad, rowwise_adagrad, >= 0
  float beta1 = 0.9f;                // adam, [0, 1)
  float beta2 = 0.999f;              // adam, [0, 1)
  bool operator==(const OptimizerSpec&) const = default;
};

inline constexpr std::uint32_t kMaxDim = 16384;

struct TableSchema {
  std::uint32_t id = 0;       // id_of_name(namespace/name)
  std::uint32_t version = 1;  // raised by a schema change
  std::string name;           // "namespace/name"
  std::uint32_t dim = 0;      // columns, [1, kMaxDim]
  Dtype dtype = Dtype::kFloat32;
  std::uint64_t seed = 0;  // of initial rows and stochastic rounding
  InitSpec init;
  OptimizerSpec optimizer;
  bool operator==(const TableSchema&) const = default;
};

// InvalidArgument naming the field and the allowed values.
Status validate(const TableSchema& schema);
// Ok when equal; else FailedPrecondition naming the first differing field and both values.
Status same_schema(const TableSchema& existing, const TableSchema& requested);

}  // namespace sparserow

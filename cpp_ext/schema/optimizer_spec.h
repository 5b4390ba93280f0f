// Which optimizer a table has, with its options, and what is allowed for each option.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <variant>

#include "util/status.h"

namespace sparserow {

// Values are part of the wire contract.
enum class OptimizerKind : std::uint8_t {
  kSgd = 0,
  kAdagrad = 1,
  kRowWiseAdagrad = 2,
  kAdam = 3,
  kRmsprop = 4,
  kAdadelta = 5,
  kLion = 6,
  kLamb = 7,
  kFtrl = 8,
};

// In the order of the enum.
inline constexpr std::string_view kOptimizerNames[] = {
    "sgd", "adagrad", "rowwise_adagrad", "adam", "rmsprop", "adadelta", "lion", "lamb", "ftrl"};

// The float32 values of state that an optimizer has for each column, at most.
inline constexpr std::uint32_t kMostStatePerColumn = 3;

// The learning rate is not here: it travels with each commit. An option that a kind does not have keeps its default.
// optimizer_options() says which kinds have an option, and what is allowed.
struct OptimizerSpec {
  OptimizerKind kind = OptimizerKind::kSgd;
  float momentum = 0.0f;
  float dampening = 0.0f;
  bool nesterov = false;  // needs momentum > 0 and dampening == 0
  float weight_decay = 0.0f;
  bool decoupled = false;  // the decay shrinks the weights (Loshchilov & Hutter 2019), and is not in the gradient
  float eps = 1e-10f;
  float initial_accumulator = 0.0f;
  float accumulator_decay = 1.0f;  // the factor of the accumulator before each sum; 1: nothing is forgotten
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  bool amsgrad = false;
  float alpha = 0.99f;  // the factor of the mean square
  bool centered = false;
  float rho = 0.9f;  // the factor of both mean squares
  float beta = 1.0f;
  float l1 = 0.0f;
  float l2 = 0.0f;
  float group_lasso = 0.0f;
  bool operator==(const OptimizerSpec&) const = default;
};

struct OptionRange {
  std::string_view text;
  bool (*allows)(float value) noexcept;  // finite values alone
};

struct OptimizerOption {
  std::string_view name;
  std::variant<float OptimizerSpec::*, bool OptimizerSpec::*> field;
  std::span<const OptimizerKind> kinds;  // which have it
  const OptionRange& range;

  [[nodiscard]] float value(const OptimizerSpec& spec) const noexcept;  // a flag is 0 or 1
  [[nodiscard]] bool is_of(OptimizerKind kind) const noexcept;
};

// Every option but the kind.
[[nodiscard]] std::span<const OptimizerOption> optimizer_options() noexcept;

// InvalidArgument naming the option and what is allowed; "TableSchema.optimizer." precedes the name.
Status validate(const OptimizerSpec& spec);

}  // namespace sparserow

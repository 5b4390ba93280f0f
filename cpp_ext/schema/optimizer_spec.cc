#include "schema/optimizer_spec.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <string>

#include "util/not_allowed.h"

namespace sparserow {
namespace {

using Kind = OptimizerKind;

constexpr std::array kAll = {Kind::kSgd,      Kind::kAdagrad, Kind::kRowWiseAdagrad, Kind::kAdam, Kind::kRmsprop,
                             Kind::kAdadelta, Kind::kLion,    Kind::kLamb,           Kind::kFtrl};
constexpr std::array kSgd = {Kind::kSgd};
constexpr std::array kSgdRmsprop = {Kind::kSgd, Kind::kRmsprop};
constexpr std::array kWithEps = {Kind::kAdagrad, Kind::kRowWiseAdagrad, Kind::kAdam,
                                 Kind::kRmsprop, Kind::kAdadelta,       Kind::kLamb};
constexpr std::array kAdagrads = {Kind::kAdagrad, Kind::kRowWiseAdagrad};
constexpr std::array kWithBetas = {Kind::kAdam, Kind::kLion, Kind::kLamb};
constexpr std::array kAdam = {Kind::kAdam};
constexpr std::array kRmsprop = {Kind::kRmsprop};
constexpr std::array kAdadelta = {Kind::kAdadelta};
constexpr std::array kFtrl = {Kind::kFtrl};

// NaN fails every comparison.
constexpr OptionRange kFraction = {"[0, 1)", [](float value) noexcept { return value >= 0 && value < 1; }};
constexpr OptionRange kUpToOne = {"[0, 1]", [](float value) noexcept { return value >= 0 && value <= 1; }};
constexpr OptionRange kFactor = {"(0, 1]", [](float value) noexcept { return value > 0 && value <= 1; }};
constexpr OptionRange kPositive = {"> 0", [](float value) noexcept { return value > 0; }};
constexpr OptionRange kNotNegative = {">= 0", [](float value) noexcept { return value >= 0; }};
constexpr OptionRange kFlag = {"true, false", [](float value) noexcept { return value == 0 || value == 1; }};

const OptimizerOption kOptions[] = {
    {"momentum", &OptimizerSpec::momentum, kSgdRmsprop, kFraction},
    {"dampening", &OptimizerSpec::dampening, kSgd, kUpToOne},
    {"nesterov", &OptimizerSpec::nesterov, kSgd, kFlag},
    {"weight_decay", &OptimizerSpec::weight_decay, kAll, kNotNegative},
    {"decoupled", &OptimizerSpec::decoupled, kAll, kFlag},
    {"eps", &OptimizerSpec::eps, kWithEps, kPositive},
    {"initial_accumulator", &OptimizerSpec::initial_accumulator, kAdagrads, kNotNegative},
    {"accumulator_decay", &OptimizerSpec::accumulator_decay, kAdagrads, kFactor},
    {"beta1", &OptimizerSpec::beta1, kWithBetas, kFraction},
    {"beta2", &OptimizerSpec::beta2, kWithBetas, kFraction},
    {"amsgrad", &OptimizerSpec::amsgrad, kAdam, kFlag},
    {"alpha", &OptimizerSpec::alpha, kRmsprop, kFraction},
    {"centered", &OptimizerSpec::centered, kRmsprop, kFlag},
    {"rho", &OptimizerSpec::rho, kAdadelta, kFraction},
    {"beta", &OptimizerSpec::beta, kFtrl, kPositive},
    {"l1", &OptimizerSpec::l1, kFtrl, kNotNegative},
    {"l2", &OptimizerSpec::l2, kFtrl, kNotNegative},
    {"group_lasso", &OptimizerSpec::group_lasso, kFtrl, kNotNegative},
};

std::string field_of(const OptimizerOption& option) { return "TableSchema.optimizer." + std::string(option.name); }

// A default stands for the absence of an option: no option is accepted and ignored.
Status refuse_unused(const OptimizerSpec& spec, const OptimizerOption& option) {
  std::string options;
  for (const OptimizerOption& each : kOptions) {
    if (each.is_of(spec.kind)) options += (options.empty() ? "" : ", ") + std::string(each.name);
  }
  const std::string kind(kOptimizerNames[static_cast<std::size_t>(spec.kind)]);
  return not_allowed(field_of(option), option.value(spec),
                     "the default, as " + kind + " has no such option; it has " + options);
}

}  // namespace

float OptimizerOption::value(const OptimizerSpec& spec) const noexcept {
  if (const auto* number = std::get_if<float OptimizerSpec::*>(&field)) return spec.**number;
  return spec.**std::get_if<bool OptimizerSpec::*>(&field) ? 1.0f : 0.0f;
}

bool OptimizerOption::is_of(OptimizerKind kind) const noexcept {
  return std::find(kinds.begin(), kinds.end(), kind) != kinds.end();
}

std::span<const OptimizerOption> optimizer_options() noexcept { return kOptions; }

Status validate(const OptimizerSpec& spec) {
  if (static_cast<std::size_t>(spec.kind) >= std::size(kOptimizerNames)) {
    return not_allowed("TableSchema.optimizer.kind", static_cast<unsigned>(spec.kind), "0 (sgd) to 8 (ftrl)");
  }
  const OptimizerSpec defaults;
  for (const OptimizerOption& option : kOptions) {
    const float value = option.value(spec);
    if (!option.is_of(spec.kind)) {
      if (value != option.value(defaults)) return refuse_unused(spec, option);
    } else if (!std::isfinite(value) || !option.range.allows(value)) {
      return not_allowed(field_of(option), value, option.range.text);
    }
  }
  if (spec.nesterov && (spec.momentum == 0 || spec.dampening != 0)) {
    return not_allowed("TableSchema.optimizer.nesterov", "true", "true only with momentum > 0 and dampening = 0");
  }
  return Status::ok();
}

}  // namespace sparserow

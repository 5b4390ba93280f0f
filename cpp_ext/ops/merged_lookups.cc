#include "ops/merged_lookups.h"

#include "ops/gather_bag.h"

namespace sparserow::ops {
namespace {

std::vector<c10::string_view> lines_of(c10::string_view text) {
  std::vector<c10::string_view> lines;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find('\n', begin), text.size());
    lines.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return lines;
}

}  // namespace

MergedLookups::MergedLookups(const char* op, at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                             c10::string_view tables, at::IntArrayRef options)
    : ids_(ids), weights_(weights), options_(options), rows_(ids.size()), bags_(ids.size()) {
  const std::vector<c10::string_view> names = lines_of(tables);
  const std::size_t n = ids.size();
  const auto fits = [n](at::TensorList list) { return list.empty() || list.size() == n; };
  if (n == 0 || !fits(offsets) || !fits(weights) || names.size() != n ||
      options.size() != n * static_cast<std::size_t>(kMergedOptions)) {
    raise({Code::kInvalidArgument, std::string(op) + ": " + std::to_string(n) + " ids, " +
                                       std::to_string(names.size()) + " tables, " + std::to_string(options.size()) +
                                       " options; allowed: as many of each, " + std::to_string(kMergedOptions) +
                                       " options for each"});
  }
  for (std::size_t i = 0; i < n; ++i) {
    if ((offsets.empty() && option(i, kMergedHasOffsets) != 0) ||
        (weights.empty() && option(i, kMergedHasWeights) != 0)) {
      raise({Code::kInvalidArgument, std::string(op) + ": lookup " + std::to_string(i) +
                                         " has offsets or weights, and the list of them is empty"});
    }
    auto binding = binding_of(names[i], option(i, kMergedDim));
    if (!is_bag(i)) {
      wanted_.push_back({std::move(binding), rows_[i].emplace(ids[i]).ref()});
      continue;
    }
    check_bag_mode(ids[i], this->weights(i), option(i, kMergedMode));
    const auto given = option(i, kMergedHasOffsets) != 0 ? std::optional(offsets[i]) : std::nullopt;
    const Bags& bag = bags_[i].emplace(ids[i], given, option(i, kMergedIncludesLast) != 0, option(i, kMergedPadding));
    wanted_.push_back({std::move(binding), bag.ids().ref()});
  }
}

}  // namespace sparserow::ops

#include "ops/gather_merged.h"

#include <deque>
#include <optional>

#include "ops/arguments.h"
#include "ops/bags.h"
#include "ops/gather.h"
#include "ops/gather_bag.h"
#include "session/read_together.h"

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

std::vector<at::Tensor> gather_merged(at::TensorList ids, at::TensorList offsets, at::TensorList weights,
                                      c10::string_view tables, at::IntArrayRef options) {
  const std::vector<c10::string_view> names = lines_of(tables);
  const std::size_t n = ids.size();
  if (n == 0 || offsets.size() != n || weights.size() != n || names.size() != n ||
      options.size() != n * static_cast<std::size_t>(kMergedOptions)) {
    raise({Code::kInvalidArgument, "gather_merged: " + std::to_string(n) + " ids, " + std::to_string(names.size()) +
                                       " tables, " + std::to_string(options.size()) +
                                       " options; allowed: as many of each, " + std::to_string(kMergedOptions) +
                                       " options for each"});
  }
  const auto option = [&](std::size_t i, MergedOption which) {
    return options[i * static_cast<std::size_t>(kMergedOptions) + static_cast<std::size_t>(which)];
  };
  const auto given = [&](at::TensorList all, std::size_t i, MergedOption has) {
    return option(i, has) != 0 ? std::optional(all[i]) : std::nullopt;
  };
  std::deque<HostIds> rows;
  std::deque<Bags> bags;
  std::vector<BoundIds> wanted;
  for (std::size_t i = 0; i < n; ++i) {
    auto binding = binding_of(names[i], option(i, kMergedDim));
    if (option(i, kMergedMode) == kRowsOfIds) {
      wanted.push_back({std::move(binding), rows.emplace_back(ids[i]).ref()});
      continue;
    }
    check_bag_mode(ids[i], given(weights, i, kMergedHasWeights), option(i, kMergedMode));
    const auto& bag = bags.emplace_back(ids[i], given(offsets, i, kMergedHasOffsets),
                                        option(i, kMergedIncludesLast) != 0, option(i, kMergedPadding));
    wanted.push_back({std::move(binding), bag.ids().ref()});
  }
  const std::vector<Lookup> lookups = value_or_raise(read_together(wanted));
  std::vector<at::Tensor> out;
  auto bag = bags.begin();
  for (std::size_t i = 0; i < n; ++i) {
    const int64_t dim = option(i, kMergedDim);
    if (option(i, kMergedMode) == kRowsOfIds) {
      out.push_back(rows_of(lookups[i], ids[i], dim));
    } else {
      out.push_back(std::get<0>(pool_bags(*bag++, lookups[i], given(weights, i, kMergedHasWeights), dim,
                                          option(i, kMergedMode), ids[i].device())));
    }
  }
  return out;
}

}  // namespace sparserow::ops

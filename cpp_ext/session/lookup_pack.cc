#include "session/lookup_pack.h"

#include <algorithm>
#include <cstring>

#include "session/pull_together.h"
#include "session/session_state.h"

namespace sparserow {
namespace {

std::uint32_t dim_of(const LookupPack::Group& group) { return group.binding->spec().dim; }

}  // namespace

void LookupPack::write_shifted(std::span<const std::int32_t> numbers, std::size_t by, std::byte* to) {
  const auto first = static_cast<std::int32_t>(by);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const std::int32_t shifted = numbers[i] + first;
    std::memcpy(to + i * sizeof(shifted), &shifted, sizeof(shifted));
  }
}

Result<std::unique_ptr<LookupPack>> LookupPack::look_up(std::span<const BoundIds> wanted, bool train) {
  auto lookups = look_up_together(wanted, train);
  if (!lookups.is_ok()) return lookups.status();
  auto pack = std::make_unique<LookupPack>();
  for (std::size_t i = 0; i < wanted.size(); ++i) pack->add(wanted[i].binding, wanted[i].ids.ids, lookups.value()[i]);
  return pack;
}

void LookupPack::add(const std::shared_ptr<Binding>& binding, std::span<const std::int64_t> ids, const Lookup& lookup) {
  auto found = std::find_if(groups_.begin(), groups_.end(), [&](const Group& group) {
    return group.binding == binding && group.rows.rows() == lookup.rows();
  });
  if (found == groups_.end()) {
    found = groups_.insert(groups_.end(), {binding, {}, {}, lookup, 0, 0, -1});
    places_.emplace_back();
  }
  Part part;
  part.group = static_cast<std::size_t>(found - groups_.begin());
  part.positions.resize(ids.size());
  std::vector<std::uint32_t>& places = places_[part.group];
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const std::uint32_t index = lookup.indexes()[i];
    if (index >= places.size()) places.resize(std::size_t{index} + 1 + places.size() / 2, 0);
    if (places[index] == 0) {
      found->keys.push_back(static_cast<std::uint64_t>(ids[i]));
      found->indexes.push_back(index);
      places[index] = static_cast<std::uint32_t>(found->keys.size());
    }
    part.positions[i] = static_cast<std::int32_t>(places[index] - 1);
  }
  parts_.push_back(std::move(part));
  lay_out();
}

void LookupPack::lay_out() {
  runs_.clear();
  bytes_ = 0;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    Group& group = groups_[g];
    auto run = std::find_if(runs_.begin(), runs_.end(), [&](const Run& each) { return each.dim == dim_of(group); });
    if (run == runs_.end()) {
      run = runs_.emplace(runs_.end());
      run->dim = dim_of(group);
    }
    group.run = static_cast<std::size_t>(run - runs_.begin());
    group.first = run->rows;
    run->groups.push_back(g);
    run->rows += group.keys.size();
  }
  for (Run& run : runs_) {
    run.begin = bytes_;
    bytes_ += aligned(run.rows * row_bytes(Dtype::kFloat32, run.dim));
  }
  for (std::size_t r = 0; r < runs_.size(); ++r) {
    const std::size_t begin = bytes_;
    for (Part& one : parts_) {
      if (groups_[one.group].run != r) continue;
      one.begin = bytes_;
      one.first = (bytes_ - begin) / sizeof(std::int32_t);
      runs_[r].ids += one.positions.size();
      bytes_ += one.positions.size() * sizeof(std::int32_t);
    }
    bytes_ = aligned(bytes_);
  }
  layout_begin_ = bytes_;
  bytes_ = aligned(bytes_ + kLayout * parts_.size() * sizeof(std::int32_t));
  for (Run& run : runs_) {
    if (!has_order_) break;
    run.order = bytes_;
    bytes_ += aligned((run.rows + 1) * sizeof(std::int32_t)) + aligned(run.ids * sizeof(std::int32_t));
  }
}

void LookupPack::order_ids() {
  has_order_ = true;
  lay_out();
}

std::size_t LookupPack::floats_of_sums() const noexcept {
  std::size_t floats = 0;
  for (const Group& group : groups_) floats += group.keys.size() * dim_of(group);
  return floats;
}

void LookupPack::write(std::byte* to) {
  for (const Run& run : runs_) {
    const std::size_t bytes = row_bytes(Dtype::kFloat32, run.dim);
    for (const std::size_t g : run.groups) {
      Group& group = groups_[g];
      std::byte* at = to + run.begin + group.first * bytes;
      const float* rows = group.rows.rows();
      for (std::size_t i = 0; i < group.indexes.size(); ++i, at += bytes) {
        std::memcpy(at, rows + std::size_t{group.indexes[i]} * run.dim, bytes);
      }
      group.rows = Lookup();
    }
  }
  for (const Part& part : parts_) write_shifted(part.positions, groups_[part.group].first, to + part.begin);
  write_layout(to + layout_begin_);
  for (std::size_t r = 0; r < runs_.size() && has_order_; ++r) write_order(r, to + runs_[r].order);
  places_.clear();
}

void LookupPack::write_layout(std::byte* to) const {
  std::vector<std::int32_t> paddings;
  for (const Group& group : groups_) {
    const std::int32_t at = group.padding < 0 ? -1 : position_in(group, group.padding);
    paddings.push_back(at < 0 ? -1 : at + static_cast<std::int32_t>(group.first));
  }
  std::vector<std::int32_t> numbers(kLayout * parts_.size());
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    numbers[p] = static_cast<std::int32_t>(parts_[p].first);
    numbers[parts_.size() + p] = static_cast<std::int32_t>(parts_[p].positions.size());
    numbers[2 * parts_.size() + p] = paddings[parts_[p].group];
  }
  write_shifted(numbers, 0, to);
}

void LookupPack::write_order(std::size_t run, std::byte* to) const {
  const std::size_t rows = runs_[run].rows;
  std::vector<std::int32_t> begins(rows + 1, 0), ids(runs_[run].ids);
  for (const Part& part : parts_) {
    const Group& group = groups_[part.group];
    if (group.run != run) continue;
    for (const std::int32_t position : part.positions) ++begins[group.first + static_cast<std::size_t>(position) + 1];
  }
  for (std::size_t row = 0; row < rows; ++row) begins[row + 1] += begins[row];
  std::vector<std::int32_t> next(begins.begin(), begins.end() - 1);
  for (const Part& part : parts_) {
    const Group& group = groups_[part.group];
    if (group.run != run) continue;
    auto id = static_cast<std::int32_t>(part.first);
    for (const std::int32_t position : part.positions) {
      std::int32_t& place = next[group.first + static_cast<std::size_t>(position)];
      ids[static_cast<std::size_t>(place++)] = id++;
    }
  }
  write_shifted(begins, 0, to);
  write_shifted(ids, 0, to + aligned(begins.size() * sizeof(std::int32_t)));
}

std::optional<std::size_t> LookupPack::find(const Binding& binding, std::span<const std::int64_t> ids) const {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    const Part& part = parts_[p];
    const Group& group = groups_[part.group];
    if (group.binding.get() != &binding || part.positions.size() != ids.size()) continue;
    const auto is_same = [&](std::size_t i) {
      return group.keys[static_cast<std::size_t>(part.positions[i])] == static_cast<std::uint64_t>(ids[i]);
    };
    std::size_t i = 0;
    while (i < ids.size() && is_same(i)) ++i;
    if (i == ids.size()) return p;
  }
  return std::nullopt;
}

std::int32_t LookupPack::position_in(const Group& group, std::int64_t id) noexcept {
  const auto found = std::find(group.keys.begin(), group.keys.end(), static_cast<std::uint64_t>(id));
  return found == group.keys.end() ? -1 : static_cast<std::int32_t>(found - group.keys.begin());
}

std::int32_t LookupPack::position_of(std::size_t part, std::int64_t id) const noexcept {
  const Group& group = groups_[parts_[part].group];
  const std::int32_t position = position_in(group, id);
  return position < 0 ? -1 : position + static_cast<std::int32_t>(group.first);
}

bool LookupPack::has_all_parts(std::size_t group, std::span<const StagedPart> staged) const {
  for (std::size_t p = 0; p < parts_.size(); ++p) {
    if (parts_[p].group != group) continue;
    const auto is_whole = [p](const StagedPart& one) { return one.part == p && one.padding_idx < 0; };
    if (std::none_of(staged.begin(), staged.end(), is_whole)) return false;
  }
  return true;
}

Status LookupPack::stage(std::span<const StagedPart> staged, std::span<float> sums) const {
  std::vector<std::size_t> begins(runs_.size(), 0);
  for (std::size_t r = 1; r < runs_.size(); ++r) begins[r] = begins[r - 1] + runs_[r - 1].rows * runs_[r - 1].dim;
  std::vector<std::uint8_t> marks;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    std::vector<StagedPart> mine;
    for (const StagedPart& one : staged) {
      if (parts_[one.part].group == g) mine.push_back(one);
    }
    if (mine.empty()) continue;
    // Each row is one of a part's, so all parts without padding have all of them.
    const bool has_all = has_all_parts(g, mine);
    marks.assign(group.keys.size(), has_all ? 1 : 0);
    for (const StagedPart& one : mine) {
      if (has_all) break;
      const Part& part = parts_[one.part];
      const std::int32_t padding = one.padding_idx < 0 ? -1 : position_in(group, one.padding_idx);
      for (const std::int32_t position : part.positions) {
        if (position != padding) marks[static_cast<std::size_t>(position)] = 1;
      }
    }
    const std::size_t dim = dim_of(group);
    const auto own = sums.subspan(begins[group.run] + group.first * dim, group.keys.size() * dim);
    SR_RETURN_IF_ERROR(group.binding->stage_sums(group.keys, marks, own));
  }
  return Status::ok();
}

}  // namespace sparserow

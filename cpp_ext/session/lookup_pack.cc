#include "session/lookup_pack.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "session/pull_together.h"
#include "session/session_state.h"

namespace sparserow {
namespace {

std::size_t aligned(std::size_t bytes) {
  return (bytes + LookupPack::kAlign - 1) / LookupPack::kAlign * LookupPack::kAlign;
}

std::uint32_t dim_of(const LookupPack::Group& group) { return group.binding->spec().dim; }

std::array<const std::vector<std::int32_t>*, 5> numbers_of(const DeviceDirectory::Plan& plan) {
  return {&plan.sent, &plan.kept, &plan.kept_at, &plan.put, &plan.put_at};
}

}  // namespace

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
    found = groups_.insert(groups_.end(), {binding, {}, {}, lookup, {}, std::nullopt, 0});
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
  bytes_ = 0;
  for (Group& group : groups_) {
    group.begin = bytes_;
    if (!group.plan) {
      bytes_ += aligned(group.keys.size() * row_bytes(Dtype::kFloat32, dim_of(group)));
      continue;
    }
    for (const auto* numbers : numbers_of(*group.plan)) bytes_ += aligned(numbers->size() * sizeof(std::int32_t));
    bytes_ += aligned(group.plan->sent.size() * row_bytes(group.plan->dtype, dim_of(group)));
  }
  for (Part& one : parts_) {
    one.begin = bytes_;
    bytes_ += aligned(one.positions.size() * sizeof(std::int32_t));
  }
}

void LookupPack::plan() {
  DeviceDirectory* directory = nullptr;
  for (const Group& group : groups_) directory = group.binding->state().device_directory();
  if (directory == nullptr) return;
  DeviceDirectory::Planning planning(*directory);
  for (Group& group : groups_) {
    const BindingSpec& spec = group.binding->spec();
    group.plan = planning.table(spec.table_id, group.keys, group.indexes, group.rows.rows(), group.skips);
    SessionCounters& counters = group.binding->state().counters;
    counters.device_hits += group.plan->kept.size();
    counters.device_misses += group.plan->sent.size();
    counters.device_bytes_saved += group.plan->kept.size() * row_bytes(group.plan->dtype, spec.dim);
  }
  lay_out();
}

std::size_t LookupPack::floats_of_sums() const noexcept {
  std::size_t floats = 0;
  for (const Group& group : groups_) floats += group.keys.size() * dim_of(group);
  return floats;
}

void LookupPack::write(std::byte* to) {
  for (Group& group : groups_) {
    const Dtype dtype = group.plan ? group.plan->dtype : Dtype::kFloat32;
    const float* rows = group.rows.rows();
    std::byte* at = to + group.begin;
    const auto write_row = [&](std::size_t i) {
      convert_from_float(dtype, rows + std::size_t{group.indexes[i]} * dim_of(group), at, dim_of(group));
      at += row_bytes(dtype, dim_of(group));
    };
    if (!group.plan) {
      for (std::size_t i = 0; i < group.indexes.size(); ++i) write_row(i);
    } else {
      for (const auto* numbers : numbers_of(*group.plan)) {
        if (!numbers->empty()) std::memcpy(at, numbers->data(), numbers->size() * sizeof(std::int32_t));
        at += aligned(numbers->size() * sizeof(std::int32_t));
      }
      for (const std::int32_t i : group.plan->sent) write_row(static_cast<std::size_t>(i));
    }
    group.rows = Lookup();
  }
  for (const Part& part : parts_) {
    if (part.positions.empty()) continue;
    std::memcpy(to + part.begin, part.positions.data(), part.positions.size() * sizeof(std::int32_t));
  }
  places_.clear();
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

std::int32_t LookupPack::position_of(std::size_t part, std::int64_t id) const noexcept {
  const Group& group = groups_[parts_[part].group];
  for (const std::int32_t position : parts_[part].positions) {
    if (group.keys[static_cast<std::size_t>(position)] == static_cast<std::uint64_t>(id)) return position;
  }
  return -1;
}

Status LookupPack::stage(std::span<const StagedPart> staged, std::span<const float> sums) const {
  std::size_t begin = 0;
  std::vector<std::uint8_t> marks;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    const Group& group = groups_[g];
    const std::size_t floats = group.keys.size() * dim_of(group);
    marks.assign(group.keys.size(), 0);
    bool any = false;
    for (const StagedPart& one : staged) {
      if (parts_[one.part].group != g) continue;
      any = true;
      const std::int32_t padding = one.padding_idx < 0 ? -1 : position_of(one.part, one.padding_idx);
      for (const std::int32_t position : parts_[one.part].positions) {
        if (position != padding) marks[static_cast<std::size_t>(position)] = 1;
      }
    }
    if (any) SR_RETURN_IF_ERROR(group.binding->stage_sums(group.keys, marks, sums.subspan(begin, floats)));
    begin += floats;
  }
  return Status::ok();
}

}  // namespace sparserow

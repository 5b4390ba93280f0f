#include "session/planned_ids.h"

#include <algorithm>
#include <optional>

namespace sparserow {
namespace {

struct Shape {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;  // elements from the root's first

  [[nodiscard]] bool is_contiguous() const {
    std::int64_t stride = 1;
    for (std::size_t d = sizes.size(); d-- > 0; stride *= sizes[d]) {
      if (sizes[d] > 1 && strides[d] != stride) return false;
    }
    return true;
  }
};

std::optional<Shape> shape_of(const IdPart& entry, const TensorView& root) {
  Shape shape{{root.sizes.begin(), root.sizes.end()}, {root.strides.begin(), root.strides.end()}, 0};
  if (entry.kind == IdPart::Kind::kWhole) return shape;
  if (entry.dim >= shape.sizes.size()) return std::nullopt;
  const std::int64_t length = entry.kind == IdPart::Kind::kSelect ? 1 : entry.length;
  if (entry.start + length > shape.sizes[entry.dim]) return std::nullopt;
  shape.offset = entry.start * shape.strides[entry.dim];
  if (entry.kind == IdPart::Kind::kNarrow) {
    shape.sizes[entry.dim] = entry.length;
  } else {
    shape.sizes.erase(shape.sizes.begin() + entry.dim);
    shape.strides.erase(shape.strides.begin() + entry.dim);
  }
  return shape;
}

// Copies a strided view of int32 or int64 to contiguous int64.
template <class Item>
void copy_ids(const Item* from, const Shape& shape, std::size_t dim, std::vector<std::int64_t>& out) {
  if (dim == shape.sizes.size()) {  // a scalar
    out.push_back(*from);
    return;
  }
  const std::int64_t stride = shape.strides[dim];
  if (dim + 1 < shape.sizes.size()) {
    for (std::int64_t i = 0; i < shape.sizes[dim]; ++i) copy_ids(from + i * stride, shape, dim + 1, out);
    return;
  }
  const std::size_t end = out.size();
  out.resize(end + static_cast<std::size_t>(shape.sizes[dim]));
  for (std::int64_t i = 0; i < shape.sizes[dim]; ++i) out[end + static_cast<std::size_t>(i)] = from[i * stride];
}

void copy_ids(const BatchTensor& root, const Shape& shape, std::vector<std::int64_t>& out) {
  if (root.view.item_bytes == 4) {
    copy_ids(static_cast<const std::int32_t*>(root.host) + shape.offset, shape, 0, out);
  } else {
    copy_ids(static_cast<const std::int64_t*>(root.host) + shape.offset, shape, 0, out);
  }
}

// A part's lookup without its ids; nullopt when the batch has no such part.
struct Part {
  const BatchTensor* root;
  Shape shape;
  AheadLookup lookup;
  std::size_t n;
};

std::optional<Part> part_of(const IdPart& entry, std::span<const BatchTensor> roots) {
  if (entry.root >= roots.size()) return std::nullopt;
  const BatchTensor& root = roots[entry.root];
  auto shape = shape_of(entry, root.view);
  if (!shape) return std::nullopt;
  AheadLookup lookup{entry.binding, {{}, root.view}};
  const std::int64_t bytes = shape->offset * root.view.item_bytes;
  lookup.ids.source.data = static_cast<const std::byte*>(root.view.data) + bytes;
  std::size_t n = 1;
  for (const std::int64_t size : shape->sizes) n *= static_cast<std::size_t>(size);
  return Part{&root, *std::move(shape), lookup, n};
}

void add_ids(Part& part, MergedIds& out) {
  if (part.root->view.item_bytes == 8 && part.shape.is_contiguous()) {
    part.lookup.ids.ids = {static_cast<const std::int64_t*>(part.root->host) + part.shape.offset, part.n};
  } else {
    copy_ids(*part.root, part.shape, out.copies.emplace_back());
    part.lookup.ids.ids = out.copies.back();
  }
  out.lookups.push_back(part.lookup);
}

}  // namespace

MergedIds ids_of(const PlannedIds& plan, std::span<const BatchTensor> roots) {
  MergedIds out;
  for (const IdPart& planned : plan.parts) {
    if (auto part = part_of(planned, roots)) add_ids(*part, out);
  }
  return out;
}

Status pull_merged(Session& session, const PlannedIds& plan, std::span<const BatchTensor> roots, bool train) {
  MergedIds wanted;
  for (const IdPart& planned : plan.parts) {
    auto part = part_of(planned, roots);
    if (!part) continue;
    add_ids(*part, wanted);
    if (train && session.remembers(planned.binding, part->lookup.ids)) wanted.lookups.pop_back();
  }
  if (wanted.lookups.empty()) return session.state().check_usable();
  return session.pull_ahead(wanted.lookups, train);
}

std::unique_ptr<LookupPack> pack_merged(const PlannedIds& plan, std::span<const BatchTensor> roots, bool train) {
  auto pack = std::make_unique<LookupPack>();
  const MergedIds wanted = ids_of(plan, roots);
  for (const AheadLookup& lookup : wanted.lookups) {
    const auto binding = find_binding(lookup.binding);
    if (!binding.is_ok()) continue;
    Binding& table = *binding.value();
    const auto known = train ? table.recall(lookup.ids) : table.recall_ahead(lookup.ids);
    if (known) pack->add(binding.value(), lookup.ids.ids, *known);
  }
  return pack;
}

}  // namespace sparserow

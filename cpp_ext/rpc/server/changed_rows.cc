#include "rpc/server/changed_rows.h"

#include <algorithm>

namespace sparserow::rpc {
namespace {

constexpr std::size_t kKeysAtOnce = 1024;

}  // namespace

Result<ChangedKeys> changed_keys(const Store& store, const PullPart& part) {
  ChangedKeys changed;
  const std::size_t row_bytes = std::size_t{part.descriptor.dim} * size_of(part.descriptor.dtype);
  std::vector<std::byte> rows(std::min(kKeysAtOnce, part.keys.size()) * row_bytes);
  std::vector<std::uint64_t> versions(kKeysAtOnce);
  for (std::size_t begin = 0; begin < part.keys.size(); begin += kKeysAtOnce) {
    const std::size_t n = std::min(kKeysAtOnce, part.keys.size() - begin);
    SR_RETURN_IF_ERROR(store.pull(part.descriptor.table_id, part.keys.subspan(begin, n), part.descriptor.dtype,
                                  rows.data(), {.versions = std::span(versions).first(n)}));
    for (std::size_t i = 0; i < n; ++i) {
      if (part.known[begin + i] == versions[i]) continue;
      changed.keys.push_back(part.keys[begin + i]);
      changed.positions.push_back(static_cast<std::uint32_t>(begin + i));
    }
  }
  if (changed.positions.size() % 2 != 0) changed.positions.push_back(0);
  return changed;
}

}  // namespace sparserow::rpc

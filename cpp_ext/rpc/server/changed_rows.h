// The rows that a pull with known versions is answered with: those that differ from what the client has.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "rpc/server/row_chunks.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

// Keys of one part whose rows differ, and their positions among the keys asked for, padded to 8 bytes.
struct ChangedKeys {
  std::vector<std::uint64_t> keys;
  std::vector<std::uint32_t> positions;
};

// What changed_keys() takes for each key that differs.
inline constexpr std::uint64_t kChangedKeyBytes = sizeof(std::uint64_t) + sizeof(std::uint32_t);

// Compares the versions of a conditional part's rows with those the client knows. A row that changes later is sent as
// it is then, or not at all, as with a pull that came earlier. NotFound when the table went away.
Result<ChangedKeys> changed_keys(const Store& store, const PullPart& part);

}  // namespace sparserow::rpc

// The reply to a pull with known versions: the rows that differ from what the client has, and no others.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "rpc/row_chunks.h"
#include "store/store.h"
#include "util/status.h"

namespace sparserow::rpc {

// The body of a ROWS frame for `parts`, conditional or not. Holds what differs and a piece of what does
// not, not the whole pull. NotFound when a table went away.
Result<std::vector<std::byte>> changed_rows_body(const Store& store, std::span<const PullPart> parts);

}  // namespace sparserow::rpc

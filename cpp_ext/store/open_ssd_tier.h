// Opens the SSD tier of a shard with the engine that its options name.
#pragma once

#include <memory>

#include "store/ssd/ssd_tier.h"
#include "util/status.h"

namespace sparserow {

// kInvalidArgument: the path is missing, no folder or not writable, or holds what is not this shard's;
// kFailedPrecondition: another process has it open, or this build has no RocksDB and the engine is that.
Result<std::unique_ptr<SsdTier>> open_ssd_tier(const SsdOptions& options);

}  // namespace sparserow

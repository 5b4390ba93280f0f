#include "store/open_ssd_tier.h"

#include <utility>

#include "store/ssd/pages/page_log.h"
#include "store/ssd/rocksdb_tier.h"
#include "store/ssd/ssd_folder.h"

namespace sparserow {

Result<std::unique_ptr<SsdTier>> open_ssd_tier(const SsdOptions& options) {
  if (options.engine == SsdEngine::kRocksdb && !SsdTier::has_rocksdb()) {
    return Status(Code::kFailedPrecondition,
                  "ssd_engine: this build has no RocksDB; install librocksdb-dev and build again, or take pages");
  }
  if (options.engine == SsdEngine::kRocksdb && options.direct_io) {
    return Status(Code::kInvalidArgument,
                  "ssd_direct_io: true is not allowed with ssd_engine rocksdb; allowed: false, or ssd_engine pages");
  }
  auto folder = SsdFolder::claim(options);
  if (!folder.is_ok()) return folder.status();
  return options.engine == SsdEngine::kRocksdb ? open_rocksdb(options, std::move(folder).value())
                                               : open_page_log(options, std::move(folder).value());
}

}  // namespace sparserow

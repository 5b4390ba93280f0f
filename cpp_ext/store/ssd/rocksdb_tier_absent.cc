// Compiled instead of rocksdb_tier.cc where RocksDB is not installed.
#include "store/ssd/rocksdb_tier.h"

namespace sparserow {

std::string_view rocksdb_version() noexcept { return ""; }

Result<std::unique_ptr<SsdTier>> open_rocksdb(const SsdOptions& /*options*/, std::unique_ptr<SsdFolder> /*folder*/) {
  return Status(Code::kInternal, "ssd_engine: this build has no RocksDB");
}

}  // namespace sparserow

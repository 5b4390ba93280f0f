// The engine `rocksdb` of an SSD tier. Only rocksdb_tier.cc sees RocksDB; a build without it has
// rocksdb_tier_absent.cc.
#pragma once

#include <memory>
#include <string_view>

#include "store/ssd/ssd_folder.h"
#include "store/ssd/ssd_tier.h"

namespace sparserow {

// Returns the version of the library that is loaded; "" in a build without RocksDB.
[[nodiscard]] std::string_view rocksdb_version() noexcept;
// Fails as open_ssd_tier() does. There is no write-ahead log, and values live in blob files, so that compaction moves
// keys only.
Result<std::unique_ptr<SsdTier>> open_rocksdb(const SsdOptions& options, std::unique_ptr<SsdFolder> folder);

}  // namespace sparserow

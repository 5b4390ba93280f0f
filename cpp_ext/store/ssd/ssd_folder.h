// The folder of an SSD tier: whose it is, and that one process at a time uses it. See ssd_tier.h.
#pragma once

#include <memory>
#include <string>

#include "store/ssd/ssd_tier.h"
#include "util/status.h"

namespace sparserow {

class SsdFolder {
 public:
  // Makes the folder this shard's: an empty one is taken, one of the same cluster and shard is emptied, whatever
  // engine wrote it.
  // kInvalidArgument and kFailedPrecondition as of open_ssd_tier().
  static Result<std::unique_ptr<SsdFolder>> claim(const SsdOptions& options);
  SsdFolder(const SsdFolder&) = delete;
  SsdFolder& operator=(const SsdFolder&) = delete;
  ~SsdFolder();  // gives the lock back

  [[nodiscard]] const std::string& rows_path() const noexcept { return rows_path_; }

 private:
  SsdFolder(int lock, std::string rows_path) : lock_(lock), rows_path_(std::move(rows_path)) {}

  int lock_;
  std::string rows_path_;
};

}  // namespace sparserow

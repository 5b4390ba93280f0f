// Where a session's row cache keeps its rows: one interface, two storages. row_cache.h is the host's memory; the other
// is given by Python, Triton kernels on the model's device (cpp_ext/device/device_storage.py). The rules are
// row_cache.h's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "session/row_cache.h"
#include "util/status.h"

namespace sparserow {

// Rows of tables of one width. Not thread-safe. Keys and rows of a call are in the host's memory. A storage that fails
// is not asked again.
class RowStorage {
 public:
  RowStorage() = default;
  RowStorage(const RowStorage&) = delete;
  RowStorage& operator=(const RowStorage&) = delete;
  virtual ~RowStorage() = default;

  // As the calls of RowCache.
  virtual Status probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
                       std::uint64_t* versions, float* rows) = 0;
  virtual Status put(std::uint32_t table_id, std::span<const std::uint64_t> keys, const std::uint64_t* versions,
                     const float* rows, std::int64_t validated) = 0;
  virtual Status drop(std::uint32_t table_id, std::span<const std::uint64_t> keys) = 0;
};

// bytes: at least one set of rows of `dim` columns.
using MakeStorage = std::function<Result<std::unique_ptr<RowStorage>>(std::uint64_t bytes, std::uint32_t dim)>;

class HostStorage final : public RowStorage {
 public:
  HostStorage(std::uint64_t bytes, std::uint32_t dim) : rows_(bytes, dim) {}

  static Result<std::unique_ptr<RowStorage>> make(std::uint64_t bytes, std::uint32_t dim) {
    return std::unique_ptr<RowStorage>(std::make_unique<HostStorage>(bytes, dim));
  }
  Status probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
               std::uint64_t* versions, float* rows) override {
    rows_.probe(table_id, keys, oldest, found, versions, rows);
    return Status::ok();
  }
  Status put(std::uint32_t table_id, std::span<const std::uint64_t> keys, const std::uint64_t* versions,
             const float* rows, std::int64_t validated) override {
    rows_.put(table_id, keys, versions, rows, validated);
    return Status::ok();
  }
  Status drop(std::uint32_t table_id, std::span<const std::uint64_t> keys) override {
    rows_.drop(table_id, keys);
    return Status::ok();
  }

 private:
  RowCache rows_;
};

}  // namespace sparserow

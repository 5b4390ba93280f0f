// The yardstick of `sparserow bench tiers`: the database of the SSD tier alone, without a store above it.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <memory>
#include <string>
#include <vector>

#include "shared_arrays.h"
#include "shared_errors.h"
#include "store/open_ssd_tier.h"
#include "store/ssd/pages/uring_reads.h"
#include "util/hash.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::uint32_t kTable = 1;

class RawSsd {
 public:
  RawSsd(const std::string& path, std::size_t row_bytes, SsdEngine engine, bool direct_io, bool with_uring)
      : row_(row_bytes) {
    std::uint64_t random = 1;
    for (std::byte& byte : row_) byte = static_cast<std::byte>((random = random * 6364136223846793005ull + 1) >> 56);
    ssd_ = value_or_raise(
        open_ssd_tier({.path = path, .engine = engine, .direct_io = direct_io, .with_uring = with_uring}));
  }

  // Reads rows in one batch and writes others in one; returns how many were there.
  std::uint64_t serve(const py::array& reads, const py::array& writes, bool are_known) {
    const auto wanted = keys_of(reads);
    const auto changed = keys_of(writes);
    Status status;
    std::uint64_t found = 0;
    {
      const py::gil_scoped_release released;
      const auto keys = ssd_keys(wanted);
      SsdImages images;
      status = ssd_->read(keys, images);
      for (std::size_t i = 0; status.is_ok() && i < keys.size(); ++i) found += images.at(i).empty() ? 0 : 1;
      SsdBatch batch;
      const auto before = are_known ? SsdBatch::Before::kImage : SsdBatch::Before::kNothing;
      for (const SsdKey& key : ssd_keys(changed)) batch.put(key, row_, before);
      if (status.is_ok()) status = ssd_->write(batch);
    }
    raise_if_error(status);
    return found;
  }

  [[nodiscard]] py::dict stats() const {
    const SsdStats stats = ssd_->stats();
    py::dict out;
    out["disk_bytes_read"] = stats.disk_bytes_read;
    out["disk_bytes_written"] = stats.disk_bytes_written;
    out["file_bytes"] = stats.file_bytes;
    out["garbage_bytes"] = stats.garbage_bytes;
    out["memory_bytes"] = stats.memory_bytes;
    out["background_jobs"] = stats.background_jobs;
    return out;
  }

 private:
  static std::vector<SsdKey> ssd_keys(std::span<const std::uint64_t> keys) {
    std::vector<SsdKey> out;
    out.reserve(keys.size());
    for (const std::uint64_t key : keys) {
      out.push_back(ssd_key(slot_of(row_hash(kTable, key), kDefaultSlotCount), kTable, key));
    }
    return out;
  }

  std::vector<std::byte> row_;
  std::unique_ptr<SsdTier> ssd_;
};

}  // namespace

void bind_raw_ssd(py::module_& module) {
  py::class_<RawSsd>(module, "RawSsd")
      .def(py::init([](const std::string& path, std::size_t row_bytes, const std::string& engine, bool direct_io,
                       bool with_uring) {
             return std::make_unique<RawSsd>(path, row_bytes, value_or_raise(ssd_engine_of(engine)), direct_io,
                                             with_uring);
           }),
           py::arg("path"), py::kw_only(), py::arg("row_bytes"), py::arg("engine") = "pages",
           py::arg("direct_io") = false, py::arg("with_uring") = true)
      .def("serve", &RawSsd::serve, py::arg("reads"), py::arg("writes"), py::kw_only(), py::arg("are_known"))
      .def("stats", &RawSsd::stats);
  module.def("has_io_uring", [] { return UringReads::open() != nullptr; });
}

}  // namespace sparserow::bindings

// The engine of the SSD tier that the tests of a file run with; main() runs them once with each that is built, and with
// pages by direct I/O where the folder for temporary files allows it. Every read waits for the disk there, so files
// whose tests are about what is above the engine have that run in the long form alone (SPARSEROW_TEST_FULL=1).
#pragma once

#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <string>

#include "store/ssd/ssd_tier.h"

namespace sparserow {

inline SsdEngine ssd_engine = SsdEngine::kPages;  // NOLINT: main() sets it between runs
inline bool ssd_direct_io = false;                // NOLINT: the same

// A budget for rows in memory, and for the index that the engine keeps of rows on the SSD.
inline std::uint64_t with_index(std::uint64_t rows_bytes, std::uint64_t rows_on_ssd) {
  constexpr std::uint64_t kIndexBytes = 15;  // of a row, at the worst point of growth
  return rows_bytes + (ssd_engine == SsdEngine::kPages ? kIndexBytes * rows_on_ssd : 0);
}

inline bool has_direct_io(const std::filesystem::path& folder) {
  const std::string path = (folder / ("sparserow-direct-" + std::to_string(::getpid()))).string();
  const int file = ::open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_DIRECT, 0600);
  if (file >= 0) ::close(file);
  ::unlink(path.c_str());
  return file >= 0;
}

enum class DirectRun : std::uint8_t { kAlways, kLongForm };

inline int run_with_each_engine(int argc, char** argv, DirectRun direct_run) {
  struct Variant {
    const char* name;
    SsdEngine engine;
    bool is_direct;
  };
  int failed = 0;
  for (const Variant& variant :
       {Variant{"pages", SsdEngine::kPages, false}, Variant{"pages by direct I/O", SsdEngine::kPages, true},
        Variant{"rocksdb", SsdEngine::kRocksdb, false}}) {
    if (variant.engine == SsdEngine::kRocksdb && !SsdTier::has_rocksdb()) continue;
    if (variant.is_direct && direct_run == DirectRun::kLongForm && std::getenv("SPARSEROW_TEST_FULL") == nullptr)
      continue;
    if (variant.is_direct && !has_direct_io(std::filesystem::temp_directory_path())) continue;
    std::cout << "ssd_engine: " << variant.name << std::endl;
    ssd_engine = variant.engine;
    ssd_direct_io = variant.is_direct;
    doctest::Context context(argc, argv);
    failed |= context.run();
    if (context.shouldExit()) break;
  }
  return failed;
}

}  // namespace sparserow

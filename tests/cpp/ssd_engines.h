// The engine of the SSD tier that the tests of a file run with; main() runs them once with each that is built.
#pragma once

#include <doctest/doctest.h>

#include <cstdint>
#include <iostream>

#include "store/ssd/ssd_tier.h"

namespace sparserow {

inline SsdEngine ssd_engine = SsdEngine::kPages;  // NOLINT: main() sets it between runs

// A budget for rows in memory, and for the index that the engine keeps of rows on the SSD.
inline std::uint64_t with_index(std::uint64_t rows_bytes, std::uint64_t rows_on_ssd) {
  constexpr std::uint64_t kIndexBytes = 15;  // of a row, at the worst point of growth
  return rows_bytes + (ssd_engine == SsdEngine::kPages ? kIndexBytes * rows_on_ssd : 0);
}

inline int run_with_each_engine(int argc, char** argv) {
  int failed = 0;
  for (const SsdEngine engine : {SsdEngine::kPages, SsdEngine::kRocksdb}) {
    if (engine == SsdEngine::kRocksdb && !SsdTier::has_rocksdb()) continue;
    std::cout << "ssd_engine: " << (engine == SsdEngine::kPages ? "pages" : "rocksdb") << std::endl;
    ssd_engine = engine;
    doctest::Context context(argc, argv);
    failed |= context.run();
    if (context.shouldExit()) break;
  }
  return failed;
}

}  // namespace sparserow

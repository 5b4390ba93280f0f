// Advice to the system on memory that the headers may not know yet: they may be older than the system.
#pragma once

#include <sys/mman.h>

namespace sparserow {

#ifdef MADV_COLLAPSE
inline constexpr int kCollapse = MADV_COLLAPSE;
#else
inline constexpr int kCollapse = 25;  // Linux 6.1 and newer
#endif
#ifdef MADV_POPULATE_WRITE
inline constexpr int kPopulateWrite = MADV_POPULATE_WRITE;
#else
inline constexpr int kPopulateWrite = 23;  // Linux 5.14 and newer
#endif

}  // namespace sparserow

// Which instruction sets this machine has, for kernels that are compiled once per set.
#pragma once

#include <cstdint>

namespace sparserow {

enum class Isa : std::uint8_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2 };

// True when this CPU and its operating system can run kernels of `isa`.
[[nodiscard]] bool is_supported(Isa isa) noexcept;

// The widest supported set. Thread-safe.
[[nodiscard]] Isa best_isa() noexcept;

}  // namespace sparserow

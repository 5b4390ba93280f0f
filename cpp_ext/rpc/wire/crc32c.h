// CRC-32C (Castagnoli, polynomial 0x1EDC6F41 reflected), as iSCSI (RFC 3720, appendix B.4) uses it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparserow::rpc {

// Continues `crc` (0 to begin) over `bytes`. Uses SSE4.2 when the CPU has it. Thread-safe.
[[nodiscard]] std::uint32_t crc32c(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;
// The table-driven form, for CPUs without the instruction; the tests hold it against the other.
[[nodiscard]] std::uint32_t crc32c_portable(std::uint32_t crc, const void* data, std::size_t bytes) noexcept;

}  // namespace sparserow::rpc

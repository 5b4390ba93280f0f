// Bytes of a fixed length that Python gives: a worker's proof, or the SHA-256 of one.
#pragma once

#include <array>
#include <cstring>
#include <string>

#include "shared_errors.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

// Zeros for an empty string. Throws when the length is another.
template <std::size_t Size>
std::array<std::byte, Size> bytes_of_proof(const std::string& bytes) {
  std::array<std::byte, Size> proof{};
  if (!bytes.empty() && bytes.size() != Size) {
    raise_if_error(not_allowed("worker_proof's bytes", bytes.size(), "0 or " + std::to_string(Size)));
  }
  std::memcpy(proof.data(), bytes.data(), bytes.size());
  return proof;
}

}  // namespace sparserow::bindings

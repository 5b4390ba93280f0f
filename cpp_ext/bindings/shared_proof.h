// A worker's proof as Python gives it: 16 bytes, or none.
#pragma once

#include <cstring>
#include <string>

#include "commit/job_clock.h"
#include "shared_errors.h"
#include "util/not_allowed.h"

namespace sparserow::bindings {

// Zeros for an empty string. Throws when the length is another.
inline rpc::WorkerProof worker_proof_of(const std::string& bytes) {
  rpc::WorkerProof proof{};
  if (!bytes.empty() && bytes.size() != proof.size()) {
    raise_if_error(not_allowed("worker_proof's bytes", bytes.size(), "0 or 16"));
  }
  std::memcpy(proof.data(), bytes.data(), bytes.size());
  return proof;
}

}  // namespace sparserow::bindings

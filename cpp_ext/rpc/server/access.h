// What peers may do on the data plane: tokens, each with a role and namespaces.
//
// A token comes with HELLO and is known by its SHA-256 alone. Each role includes those before it:
//   serve-read   LOOKUP, PULL without a step, SCAN, PING
//   train        all of the data plane
//   admin        as train; on the control plane also what shards and operators ask
// A token that names namespaces reaches their tables only; a table's namespace stands before the "/" of its name.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "rpc/wire/frame.h"
#include "util/mutex.h"
#include "util/status.h"

namespace sparserow::rpc {

enum class Role : std::uint8_t { kServeRead = 0, kTrain = 1, kAdmin = 2 };

using TokenDigest = std::array<std::byte, 32>;
[[nodiscard]] TokenDigest digest_of(std::string_view token);

struct Grant {
  TokenDigest digest{};
  Role role = Role::kServeRead;
  std::vector<std::string> namespaces;  // empty: all

  // kPermissionDenied names what is missing.
  [[nodiscard]] Status allows(const FrameHeader& header) const;
  [[nodiscard]] Status allows_table(const std::string& name) const;
};

// The tokens of a server, which may be changed while it runs. Thread-safe.
class AccessList {
 public:
  // nullopt: every peer that reaches the server may do everything.
  void set(std::optional<std::vector<Grant>> grants);
  // Changes with every set().
  [[nodiscard]] std::uint64_t generation() const noexcept { return generation_.load(std::memory_order_acquire); }
  [[nodiscard]] bool is_open() const;
  // The grant of a token; kPermissionDenied when there is none. An open list grants everything.
  [[nodiscard]] Result<Grant> find(const TokenDigest& digest) const;

 private:
  mutable Mutex mutex_;
  std::optional<std::vector<Grant>> grants_ SR_GUARDED_BY(mutex_);
  std::atomic<std::uint64_t> generation_{0};
};

}  // namespace sparserow::rpc

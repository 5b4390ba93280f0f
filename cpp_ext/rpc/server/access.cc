#include "rpc/server/access.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>

namespace sparserow::rpc {

TokenDigest digest_of(std::string_view token) {
  TokenDigest digest;
  SHA256(reinterpret_cast<const unsigned char*>(token.data()), token.size(),
         reinterpret_cast<unsigned char*>(digest.data()));
  return digest;
}

Status Grant::allows(const FrameHeader& header) const {
  if (role != Role::kServeRead) return Status::ok();
  const auto type = static_cast<FrameType>(header.type);
  const bool reads = type == FrameType::kPing || type == FrameType::kLookup || type == FrameType::kScan ||
                     (type == FrameType::kPull && header.step == kNoStep);
  if (reads) return Status::ok();
  return Status(Code::kPermissionDenied,
                "token: its role serve-read does not allow " + std::string(type_name(type)) + "; train does");
}

Status Grant::allows_table(const std::string& name) const {
  if (namespaces.empty()) return Status::ok();
  const std::string_view owner = std::string_view(name).substr(0, name.find('/'));
  if (std::find(namespaces.begin(), namespaces.end(), owner) != namespaces.end()) return Status::ok();
  return Status(Code::kPermissionDenied,
                "token: it does not reach namespace '" + std::string(owner) + "' of '" + name + "'");
}

void AccessList::set(std::optional<std::vector<Grant>> grants) {
  const MutexLock lock(mutex_);
  grants_ = std::move(grants);
  generation_.fetch_add(1, std::memory_order_release);
}

bool AccessList::is_open() const {
  const MutexLock lock(mutex_);
  return !grants_;
}

Result<Grant> AccessList::find(const TokenDigest& digest) const {
  const MutexLock lock(mutex_);
  if (!grants_) return Grant{.digest = digest, .role = Role::kAdmin, .namespaces = {}};
  for (const Grant& grant : *grants_) {  // of secrets the digests are compared: time shows nothing of a token
    if (CRYPTO_memcmp(grant.digest.data(), digest.data(), digest.size()) == 0) return grant;
  }
  return Status(Code::kPermissionDenied, "token: it is missing, or not one that this server knows");
}

}  // namespace sparserow::rpc

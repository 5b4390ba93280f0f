// TLS as Python gives it: (authorities, certificate, key) in PEM, or None.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "rpc/transport/tls.h"
#include "shared_errors.h"

namespace sparserow::bindings {

using TlsTuple = std::optional<std::tuple<std::string, std::string, std::string>>;

// Null for None. Throws what is wrong with a text.
template <auto make>
std::shared_ptr<const rpc::TlsContext> tls_of(const TlsTuple& texts) {
  if (!texts) return nullptr;
  const auto& [authorities, certificate, key] = *texts;
  return value_or_raise(make({.authorities = authorities, .certificate = certificate, .key = key}));
}

}  // namespace sparserow::bindings

// A peer that connects to a local socket and does not check which user listens there.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "util/file_descriptor.h"

namespace sparserow::testing {

inline FileDescriptor knock(const std::string& name) {
  FileDescriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return ::connect(fd.get(), reinterpret_cast<sockaddr*>(&address), size) == 0 ? std::move(fd) : FileDescriptor();
}

}  // namespace sparserow::testing

#include "rpc/transport/local_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "util/file_descriptor.h"

namespace sparserow::rpc {
namespace {

struct AbstractAddress {
  explicit AbstractAddress(const std::string& name) {
    address.sun_family = AF_UNIX;
    const std::size_t most = sizeof address.sun_path - 1;  // the first byte is 0, which makes it abstract
    const std::size_t count = std::min(name.size(), most);
    std::memcpy(address.sun_path + 1, name.data(), count);
    size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + count);
  }
  [[nodiscard]] const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&address); }

  sockaddr_un address{};
  socklen_t size = 0;
};

FileDescriptor unix_socket() {
  return FileDescriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

Status failed(const std::string& what, const std::string& name) {
  return {Code::kUnavailable, what + " @" + name + ": " + std::strerror(errno)};
}

}  // namespace

std::string local_socket_name(std::uint64_t cluster_id, std::uint32_t shard, std::uint16_t port) {
  std::string name = "sparserow/";
  name += std::to_string(cluster_id);
  name += '/';
  name += std::to_string(shard);
  name += '/';
  name += std::to_string(port);
  return name;
}

Result<int> listen_local(const std::string& name) {
  FileDescriptor fd = unix_socket();
  const AbstractAddress address(name);
  if (fd.is_open() && ::bind(fd.get(), address.get(), address.size) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) {
    return fd.release();
  }
  return failed("cannot listen on", name);
}

Result<std::unique_ptr<Stream>> connect_local(const std::string& name) {
  FileDescriptor fd = unix_socket();
  const AbstractAddress address(name);
  if (!fd.is_open() || ::connect(fd.get(), address.get(), address.size) != 0) return failed("cannot connect to", name);
  if (!is_of_this_user(fd.get())) return Status(Code::kUnavailable, "@" + name + ": another user's process listens");
  return make_socket_stream(fd.release());
}

bool is_of_this_user(int fd) noexcept {
  ucred peer{};
  socklen_t size = sizeof peer;
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == ::geteuid();
}

bool is_of_this_host(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* first = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &first) != 0) return false;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(first, &::freeaddrinfo);
  for (const addrinfo* at = first; at != nullptr; at = at->ai_next) {
    // The port is 0, so the system chooses a free one; it binds to addresses of this host alone.
    const FileDescriptor fd(::socket(at->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd.is_open() && ::bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0) return true;
  }
  return false;
}

}  // namespace sparserow::rpc

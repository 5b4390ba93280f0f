#include "rpc/transport/stream.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>

namespace sparserow::rpc {
namespace {

Transfer transfer_of(ssize_t moved, Transfer::Want want) noexcept {
  if (moved > 0) return {static_cast<std::size_t>(moved), Transfer::Want::kNothing, 0};
  if (moved == 0) return {};
  if (errno == EAGAIN || errno == EWOULDBLOCK) return {0, want, 0};
  return {0, Transfer::Want::kNothing, errno};
}

// A connection whose peer's kernel is silent is given up after kSilenceMs, whether something is under way or not. By
// itself TCP tries again as late as it was silent before, so 10 s later when a cable was out for as long, and it does
// not notice at all while it waits for an answer that the peer gave up sending. Accepted connections have no such
// limit: a client may have reasons not to read for long.
constexpr unsigned kSilenceMs = 10'000;
constexpr int kIdleSeconds = 5;  // before the first probe
constexpr int kProbeSeconds = 2;

void notice_silence(int fd) noexcept {
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kSilenceMs, sizeof kSilenceMs);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kIdleSeconds, sizeof kIdleSeconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kProbeSeconds, sizeof kProbeSeconds);
}

// A message of some pieces that takes one descriptor along, or has room for one.
struct DescriptorMessage {
  DescriptorMessage(std::span<const iovec> pieces, int count) {
    message.msg_iov = const_cast<iovec*>(pieces.data());
    message.msg_iovlen = static_cast<std::size_t>(count);
    message.msg_control = control.data();
    message.msg_controllen = CMSG_LEN(sizeof(int));
  }
  DescriptorMessage(const DescriptorMessage&) = delete;
  DescriptorMessage& operator=(const DescriptorMessage&) = delete;

  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
};

class SocketStream final : public Stream {
 public:
  explicit SocketStream(int fd) : fd_(fd) {
    const int one = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);  // a Unix socket has none, and no delay
    ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  }
  [[nodiscard]] int fd() const noexcept override { return fd_.get(); }

  Transfer try_read(std::span<const iovec> into) noexcept override {
    ssize_t moved;
    do {
      if (expects_descriptor_) {
        moved = receive_with_descriptor(into);
      } else if (into.size() == 1) {
        moved = ::recv(fd(), into[0].iov_base, into[0].iov_len, 0);
      } else {
        moved = ::readv(fd(), into.data(), count(into));
      }
    } while (moved < 0 && errno == EINTR);
    return transfer_of(moved, Transfer::Want::kRead);
  }

  Transfer try_write(std::span<const iovec> from) noexcept override {
    ssize_t moved;
    do {
      if (from.size() == 1) {
        moved = ::send(fd(), from[0].iov_base, from[0].iov_len, MSG_NOSIGNAL);
      } else {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(from.data());  // sendmsg does not write to it
        message.msg_iovlen = static_cast<std::size_t>(count(from));
        moved = ::sendmsg(fd(), &message, MSG_NOSIGNAL);
      }
    } while (moved < 0 && errno == EINTR);
    return transfer_of(moved, Transfer::Want::kWrite);
  }

  Transfer try_write_with(std::span<const iovec> from, int descriptor) noexcept override {
    DescriptorMessage with(from, count(from));
    cmsghdr* const passed = CMSG_FIRSTHDR(&with.message);
    *passed = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    std::memcpy(CMSG_DATA(passed), &descriptor, sizeof descriptor);
    ssize_t moved;
    do {
      moved = ::sendmsg(fd(), &with.message, MSG_NOSIGNAL);
    } while (moved < 0 && errno == EINTR);
    return transfer_of(moved, Transfer::Want::kWrite);
  }

  void expect_descriptor() noexcept override { expects_descriptor_ = true; }
  FileDescriptor take_descriptor() noexcept override {
    expects_descriptor_ = false;
    return std::move(descriptor_);
  }

  void be_readable_from(std::size_t bytes) noexcept override {
    const int least = static_cast<int>(std::min<std::size_t>(bytes, INT_MAX));
    if (least == std::exchange(readable_from_, least)) return;
    ::setsockopt(fd(), SOL_SOCKET, SO_RCVLOWAT, &least, sizeof least);
  }

  void shutdown_write() noexcept override { ::shutdown(fd(), SHUT_WR); }
  void reset() noexcept override { ::shutdown(fd(), SHUT_RDWR); }

 private:
  static int count(std::span<const iovec> pieces) noexcept {
    return static_cast<int>(std::min<std::size_t>(pieces.size(), IOV_MAX));
  }
  // There is room for one descriptor; the system closes others that come with it.
  ssize_t receive_with_descriptor(std::span<const iovec> into) noexcept {
    DescriptorMessage with(into, count(into));
    const ssize_t moved = ::recvmsg(fd(), &with.message, MSG_CMSG_CLOEXEC);
    if (moved < 0) return moved;
    const cmsghdr* const passed = CMSG_FIRSTHDR(&with.message);
    if (passed != nullptr && passed->cmsg_level == SOL_SOCKET && passed->cmsg_type == SCM_RIGHTS &&
        passed->cmsg_len == CMSG_LEN(sizeof(int))) {
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(passed), sizeof descriptor);
      FileDescriptor received(descriptor);
      if (!descriptor_.is_open()) descriptor_ = std::move(received);
    }
    return moved;
  }

  FileDescriptor fd_;
  int readable_from_ = 1;
  bool expects_descriptor_ = false;
  FileDescriptor descriptor_;
};

struct AddressList {
  addrinfo* first = nullptr;
  AddressList() = default;
  AddressList(const AddressList&) = delete;
  AddressList& operator=(const AddressList&) = delete;
  ~AddressList() {
    if (first != nullptr) ::freeaddrinfo(first);
  }
};

Status resolve(const std::string& host, std::uint16_t port, int flags, AddressList& out) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  const int error = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &out.first);
  if (error == 0) return Status::ok();
  return Status(Code::kUnavailable, "cannot resolve " + host + ": " + ::gai_strerror(error));
}

}  // namespace

std::string Stream::why(const Transfer& ended) const { return std::strerror(ended.error); }

std::unique_ptr<Stream> make_socket_stream(int fd) { return std::make_unique<SocketStream>(fd); }

Result<std::unique_ptr<Stream>> start_connect(const std::string& host, std::uint16_t port) {
  AddressList addresses;
  SR_RETURN_IF_ERROR(resolve(host, port, 0, addresses));
  int error = 0;
  for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
    FileDescriptor fd(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol));
    if (fd.get() >= 0) notice_silence(fd.get());
    if (fd.get() >= 0 && (::connect(fd.get(), at->ai_addr, at->ai_addrlen) == 0 || errno == EINPROGRESS)) {
      return make_socket_stream(fd.release());
    }
    error = errno;
  }
  return Status(Code::kUnavailable, std::strerror(error));
}

int connect_error(const Stream& stream) noexcept {
  int error = 0;
  socklen_t size = sizeof error;
  if (::getsockopt(stream.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

Result<int> listen_tcp(const std::string& host, std::uint16_t port) {
  AddressList addresses;
  SR_RETURN_IF_ERROR(resolve(host, port, AI_PASSIVE, addresses));
  int error = 0;
  for (const addrinfo* at = addresses.first; at != nullptr; at = at->ai_next) {
    FileDescriptor fd(::socket(at->ai_family, at->ai_socktype | SOCK_CLOEXEC | SOCK_NONBLOCK, at->ai_protocol));
    const int one = 1;
    if (fd.get() >= 0 && ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        ::bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0 && ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd.release();
    }
    error = errno;
  }
  return Status(Code::kUnavailable,
                "cannot listen on " + host + ":" + std::to_string(port) + ": " + std::strerror(error));
}

std::uint16_t local_port(int fd) noexcept {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return 0;
  if (address.ss_family == AF_INET6) return ntohs(reinterpret_cast<sockaddr_in6*>(&address)->sin6_port);
  return ntohs(reinterpret_cast<sockaddr_in*>(&address)->sin_port);
}

std::string peer_address(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) return "unknown";
  if (address.ss_family == AF_UNIX) return kLocalPeer;
  std::array<char, NI_MAXHOST> host{};
  const int error =
      ::getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host.data(), host.size(), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? host.data() : "unknown";
}

}  // namespace sparserow::rpc

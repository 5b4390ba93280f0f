// A peer that speaks bytes, not frames: what the tests use to send what no client of ours would.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "rpc/wire/frame.h"
#include "util/hash.h"

namespace sparserow::testing {

class RawPeer {
 public:
  explicit RawPeer(std::uint16_t port) : fd_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) throw std::runtime_error("connect");
    const linger now{1, 0};  // closing resets: no port waits
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof now);
  }
  RawPeer(const RawPeer&) = delete;
  RawPeer& operator=(const RawPeer&) = delete;
  ~RawPeer() { ::close(fd_); }
  [[nodiscard]] int fd() const noexcept { return fd_; }

  // False when the server has closed the connection.
  bool send(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent <= 0) return false;
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    }
    return true;
  }
  void end_writing() { ::shutdown(fd_, SHUT_WR); }

  // Waits at most timeout_ms for the next frame; false at the end of the stream or when nothing came.
  bool read_frame(rpc::FrameHeader& header, std::vector<std::byte>& body, int timeout_ms) {
    if (!read_exact(&header, sizeof header, timeout_ms)) return false;
    body.resize(header.body_bytes);
    return read_exact(body.data(), body.size(), timeout_ms);
  }
  bool greet(std::uint64_t cluster_id, const std::string& token = "", std::uint64_t features = 0) {
    rpc::HelloPayload hello;
    hello.cluster_id = cluster_id;
    hello.features = features;
    hello.hash_version = kHashVersion;
    hello.token_bytes = static_cast<std::uint32_t>(token.size());
    rpc::FrameHeader header;
    header.type = static_cast<std::uint16_t>(rpc::FrameType::kHello);
    std::vector<std::byte> body;
    return send(rpc::small_frame(header, rpc::SectionKind::kHello, bytes_of(hello), std::as_bytes(std::span(token)))) &&
           read_frame(header, body, 5000) && header.type == static_cast<std::uint16_t>(rpc::FrameType::kHelloAck);
  }

  // False at the end of the stream, or when nothing came for timeout_ms.
  bool read_exact(void* into, std::size_t bytes, int timeout_ms) {
    auto* at = static_cast<std::byte*>(into);
    while (bytes > 0) {
      pollfd readable{fd_, POLLIN, 0};
      if (::poll(&readable, 1, timeout_ms) <= 0) return false;
      const ssize_t got = ::recv(fd_, at, bytes, 0);
      if (got <= 0) return false;
      at += got;
      bytes -= static_cast<std::size_t>(got);
    }
    return true;
  }

 private:
  int fd_;
};

}  // namespace sparserow::testing

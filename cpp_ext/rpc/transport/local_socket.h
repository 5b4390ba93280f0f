// Where a shard listens for clients of its own host and user, beside TCP: an abstract Unix socket, which has no file
// and ends with its process. Its name follows from what a client knows of the shard anyhow, so that nobody announces
// it.
//
// A name says the port too, as two processes of one host cannot have one port; so whoever reaches the shard through a
// proxy or a forwarded port does not find it, and goes on by TCP.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "rpc/transport/stream.h"
#include "util/status.h"

namespace sparserow::rpc {

// The name for the shard that listens at this TCP port.
[[nodiscard]] std::string local_socket_name(std::uint64_t cluster_id, std::uint32_t shard, std::uint16_t port);

// Listens (non-blocking); the caller owns the fd. kUnavailable: the system has no such sockets, or the name is taken.
Result<int> listen_local(const std::string& name);

// A stream to whoever listens there. kUnavailable: nobody does, or a process of another user.
Result<std::unique_ptr<Stream>> connect_local(const std::string& name);

// Whether the process at the other end of a Unix socket is of this process's user, as it was when it began to listen,
// or connected.
[[nodiscard]] bool is_of_this_user(int fd) noexcept;

// Whether an address of this name or number is one of this host's. May block as long as the resolver does.
[[nodiscard]] bool is_of_this_host(const std::string& host);

}  // namespace sparserow::rpc

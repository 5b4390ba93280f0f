// The byte stream under the frames: TCP, and local sockets by rpc/transport/local_socket.h; rpc/transport/tls.h puts
// TLS into the same seam.
//
// A Stream moves what can be moved now and says what to wait for; it never blocks and never waits. The
// server waits through its event loop, the client through poll(2), both on fd(). One reader and one writer
// may use it at a time, from one thread at a time.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "util/file_descriptor.h"
#include "util/status.h"

namespace sparserow::rpc {

// What one try did. bytes > 0: that much moved. Else want says what to wait for; with kNothing the
// stream has ended: in order (error 0), or by errno.
struct Transfer {
  enum class Want : std::uint8_t { kNothing, kRead, kWrite };
  std::size_t bytes = 0;
  Want want = Want::kNothing;
  int error = 0;
  [[nodiscard]] bool ended() const noexcept { return bytes == 0 && want == Want::kNothing; }
};

class Stream {
 public:
  virtual ~Stream() = default;
  [[nodiscard]] virtual int fd() const noexcept = 0;  // owned by the stream
  // Says whether a handshake has to end before bytes move. Where nobody calls try_handshake(), reads and writes make
  // it.
  [[nodiscard]] virtual bool needs_handshake() const noexcept { return false; }
  // Takes what shows whether the peer can have begun one, which costs next to nothing. bytes > 0: it can.
  virtual Transfer try_begin() noexcept { return {1, Transfer::Want::kNothing, 0}; }
  // Goes on with the handshake, which may keep a CPU for a part of a millisecond. bytes > 0: it has ended.
  virtual Transfer try_handshake() noexcept { return {1, Transfer::Want::kNothing, 0}; }
  // Into / from the pieces in order; pieces must not be empty in sum. At most IOV_MAX are used.
  virtual Transfer try_read(std::span<const iovec> into) noexcept = 0;
  virtual Transfer try_write(std::span<const iovec> from) noexcept = 0;
  // The same, and the first byte takes a descriptor along where the stream is a Unix socket; elsewhere none.
  virtual Transfer try_write_with(std::span<const iovec> from, [[maybe_unused]] int descriptor) noexcept {
    return try_write(from);
  }
  // Keeps the first descriptor that a Unix socket's peer passes with what is read from now on, and closes later ones.
  virtual void expect_descriptor() noexcept {}
  // What has come, or none; none is kept any more.
  virtual FileDescriptor take_descriptor() noexcept { return {}; }
  // Lets fd() be readable only once `bytes` are there, or the stream has ended: whoever awaits a large frame wakes for
  // large parts of it. The system may choose a smaller number. At least so many bytes must be on their way.
  virtual void be_readable_from([[maybe_unused]] std::size_t bytes) noexcept {}
  virtual void shutdown_write() noexcept = 0;  // the peer reads to the end
  // Both sides end now; fd stays valid until destruction. Any thread.
  virtual void reset() noexcept = 0;
  // Whether bytes can be read although fd() is not readable: they have been taken from it already.
  [[nodiscard]] virtual bool has_buffered() const noexcept { return false; }
  // Why the stream ended, for the user: of a transfer that ended with an error.
  [[nodiscard]] virtual std::string why(const Transfer& ended) const;
};

// Takes over a connected or connecting socket.
[[nodiscard]] std::unique_ptr<Stream> make_socket_stream(int fd);

// Resolves (may block as long as the resolver does) and starts a non-blocking connect; writability of the
// stream ends it, then connect_error() says how. kUnavailable with the reason.
Result<std::unique_ptr<Stream>> start_connect(const std::string& host, std::uint16_t port);
[[nodiscard]] int connect_error(const Stream& stream) noexcept;  // errno of the connect; 0 when connected

// A socket that is bound and listens, non-blocking. kUnavailable names host:port when it is taken.
Result<int> listen_tcp(const std::string& host, std::uint16_t port);
[[nodiscard]] std::uint16_t local_port(int fd) noexcept;
// The address of a TCP socket's peer, without the port; kLocalPeer for a Unix socket.
inline constexpr const char* kLocalPeer = "local";
[[nodiscard]] std::string peer_address(int fd);

}  // namespace sparserow::rpc

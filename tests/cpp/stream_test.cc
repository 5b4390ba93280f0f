// Streams over real TCP sockets.
#include "rpc/transport/stream.h"

#include <doctest/doctest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <vector>

using namespace sparserow::rpc;

namespace {

bool is_readable(const Stream& stream, int wait_ms) {
  pollfd asked{stream.fd(), POLLIN, 0};
  return ::poll(&asked, 1, wait_ms) == 1;
}

// The two ends of a connection.
struct Ends {
  std::unique_ptr<Stream> ours;
  std::unique_ptr<Stream> theirs;

  Ends() {
    const int listener = listen_tcp("127.0.0.1", 0).value();
    ours = start_connect("127.0.0.1", local_port(listener)).value();
    pollfd asked{listener, POLLIN, 0};
    REQUIRE(::poll(&asked, 1, 10'000) == 1);
    theirs = make_socket_stream(::accept(listener, nullptr, nullptr));
    ::close(listener);
  }
  void send(std::size_t bytes) const {
    std::vector<std::byte> data(bytes);
    const iovec piece{data.data(), data.size()};
    REQUIRE(theirs->try_write({&piece, 1}).bytes == bytes);
  }
};

}  // namespace

TEST_CASE("a stream is readable once the bytes are there that its owner waits for") {
  const Ends ends;
  ends.ours->be_readable_from(10'000);
  ends.send(6'000);
  CHECK_FALSE(is_readable(*ends.ours, 50));
  ends.send(6'000);
  CHECK(is_readable(*ends.ours, 10'000));
}

TEST_CASE("a stream that waits for many bytes becomes readable when they are asked for no more, and at its end") {
  const Ends ends;
  ends.ours->be_readable_from(10'000);
  ends.send(100);
  CHECK_FALSE(is_readable(*ends.ours, 50));
  ends.ours->be_readable_from(1);
  CHECK(is_readable(*ends.ours, 10'000));

  const Ends other;
  other.ours->be_readable_from(10'000);
  other.send(100);
  other.theirs->shutdown_write();
  CHECK(is_readable(*other.ours, 10'000));
}

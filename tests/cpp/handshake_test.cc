// The handshake of a connection runs on a thread of its own: the I/O thread serves others meanwhile.
#include <doctest/doctest.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <future>
#include <thread>

#include "rpc/server/frame_io.h"

namespace sparserow {
namespace {

using namespace rpc;
using std::chrono::seconds;

// A socket whose handshake computes until it may end.
class SlowHandshake final : public Stream {
 public:
  SlowHandshake(int fd, std::shared_future<Transfer> end, std::promise<std::thread::id>& began)
      : under_(make_socket_stream(fd)), end_(std::move(end)), began_(began) {}

  [[nodiscard]] int fd() const noexcept override { return under_->fd(); }
  [[nodiscard]] bool needs_handshake() const noexcept override { return !is_over_; }
  Transfer try_handshake() noexcept override {
    began_.set_value(std::this_thread::get_id());
    is_over_ = true;
    return end_.get();
  }
  Transfer try_read(std::span<const iovec> into) noexcept override { return under_->try_read(into); }
  Transfer try_write(std::span<const iovec> from) noexcept override { return under_->try_write(from); }
  void shutdown_write() noexcept override { under_->shutdown_write(); }
  void reset() noexcept override { under_->reset(); }

 private:
  std::unique_ptr<Stream> under_;
  std::shared_future<Transfer> end_;
  std::promise<std::thread::id>& began_;
  bool is_over_ = false;
};

struct Scene {
  asio::io_context io{1};
  Strand strand = asio::make_strand(io);
  asio::thread_pool handshakes{1};
  Counters counters;
  std::array<int, 2> slow_pair = pair();
  std::array<int, 2> other_pair = pair();
  std::promise<Transfer> end;
  std::promise<std::thread::id> began;
  FrameIo slow{counters, strand, std::make_unique<SlowHandshake>(slow_pair[0], end.get_future().share(), began), 64};
  FrameIo other{counters, strand, make_socket_stream(other_pair[0]), 64};
  std::future<bool> secured = asio::co_spawn(strand, slow.secure(handshakes), asio::use_future);
  std::thread thread{[this] { io.run(); }};

  ~Scene() {
    slow.close();
    other.close();
    thread.join();
    handshakes.join();
    ::close(slow_pair[1]);
    ::close(other_pair[1]);
  }

  static std::array<int, 2> pair() {
    std::array<int, 2> fds{};
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds.data()) == 0);
    return fds;
  }
};

TEST_CASE("an I/O thread serves others while a handshake computes") {
  Scene scene;
  auto began = scene.began.get_future();
  REQUIRE(began.wait_for(seconds(10)) == std::future_status::ready);
  CHECK(began.get() != scene.thread.get_id());
  auto filled = asio::co_spawn(scene.strand, scene.other.fill(4), asio::use_future);
  REQUIRE(::send(scene.other_pair[1], "rows", 4, 0) == 4);
  const bool is_served = filled.wait_for(seconds(10)) == std::future_status::ready;
  CHECK(is_served);
  CHECK(scene.secured.wait_for(seconds(0)) == std::future_status::timeout);
  scene.end.set_value({1, Transfer::Want::kNothing, 0});
  REQUIRE(scene.secured.wait_for(seconds(10)) == std::future_status::ready);
  CHECK(scene.secured.get());
}

TEST_CASE("a handshake that fails, or whose connection was closed meanwhile, is no success") {
  for (const bool is_closed : {false, true}) {
    Scene scene;
    REQUIRE(scene.began.get_future().wait_for(seconds(10)) == std::future_status::ready);
    if (is_closed) scene.slow.close();
    scene.end.set_value({std::size_t{is_closed ? 1u : 0u}, Transfer::Want::kNothing, 0});
    REQUIRE(scene.secured.wait_for(seconds(10)) == std::future_status::ready);
    CHECK(!scene.secured.get());
  }
}

}  // namespace
}  // namespace sparserow

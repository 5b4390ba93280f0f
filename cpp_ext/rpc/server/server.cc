#include "rpc/server/server.h"
#include "rpc/transport/event_loop.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <list>
#include <map>
#include <thread>

#include "rpc/server/connection.h"
#include "rpc/server/server_core.h"
#include "rpc/transport/local_socket.h"
#include "rpc/transport/stream.h"
#include "store/snapshot.h"
#include "util/mutex.h"
#include "util/not_allowed.h"
#include "util/partition.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kTick{20};         // how late a parked pull may learn its deadline
constexpr std::chrono::milliseconds kStallCheck{500};  // how late a stalled connection may be closed
constexpr std::uint32_t kLeastGreeting = 64;           // connections whose HELLO may be awaited at once, at least

Status check_range(const char* field, std::uint64_t value, std::uint64_t low, std::uint64_t high) {
  if (value >= low && value <= high) return Status::ok();
  return not_allowed(field, value, range_text(low, high));
}

Status check(const ServerOptions& options) {
  SR_RETURN_IF_ERROR(check_range("io_threads", options.io_threads, 1, 256));
  SR_RETURN_IF_ERROR(check_range("disk_threads", options.disk_threads, 1, 256));
  SR_RETURN_IF_ERROR(check_range("max_frame_bytes", options.max_frame_bytes, 64u << 10, 0xfffffff8u));
  SR_RETURN_IF_ERROR(check_range("inflight_budget_bytes", options.inflight_budget_bytes, options.max_frame_bytes,
                                 std::uint64_t{1} << 62));
  if (options.client_inflight_bytes != 0) {
    SR_RETURN_IF_ERROR(check_range("client_inflight_bytes", options.client_inflight_bytes, options.max_frame_bytes,
                                   std::uint64_t{1} << 62));
  }
  SR_RETURN_IF_ERROR(check_range("reply_budget_bytes", options.reply_budget_bytes, 64u << 20, std::uint64_t{1} << 62));
  SR_RETURN_IF_ERROR(check_range("kept_budget_bytes", options.kept_budget_bytes, 0, std::uint64_t{1} << 62));
  SR_RETURN_IF_ERROR(check_range("lane_budget_bytes", options.lane_budget_bytes, 0, std::uint64_t{1} << 62));
  SR_RETURN_IF_ERROR(check_range("max_connections", options.max_connections, 1, 1u << 20));
  SR_RETURN_IF_ERROR(check_range("default_deadline_ms", options.default_deadline_ms, 1, 86'400'000));
  SR_RETURN_IF_ERROR(check_range("hello_timeout_ms", options.hello_timeout_ms, 1, 86'400'000));
  SR_RETURN_IF_ERROR(check_range("max_deadline_ms", options.max_deadline_ms, options.default_deadline_ms, 86'400'000));
  SR_RETURN_IF_ERROR(check_range("least_bytes_per_s", options.least_bytes_per_s, 0, 1u << 30));
  SR_RETURN_IF_ERROR(check_range("slow_timeout_ms", options.slow_timeout_ms, 1, 86'400'000));
  return check_range("stall_timeout_ms", options.stall_timeout_ms, 1, 86'400'000);
}

// Drops the connections that have ended or that `is_kept` refuses, and returns the others in their order.
template <class IsKept>
std::vector<std::shared_ptr<Connection>> kept(std::list<std::weak_ptr<Connection>>& connections, IsKept&& is_kept) {
  std::vector<std::shared_ptr<Connection>> alive;
  std::erase_if(connections, [&](const std::weak_ptr<Connection>& weak) {
    auto connection = weak.lock();
    if (!connection || !is_kept(*connection)) return true;
    alive.push_back(std::move(connection));
    return false;
  });
  return alive;
}

}  // namespace

class Server::Impl {
 public:
  struct Sockets {
    FileDescriptor tcp;
    FileDescriptor local;  // may be closed: there is none
  };
  Impl(const ServerOptions& options, std::shared_ptr<Store> store, Sockets sockets)
      : core_(options, std::move(store)), port_(local_port(sockets.tcp.get())), timer_(core_.io) {
    listeners_.emplace_back(core_.io, sockets.tcp.release(), false);
    if (sockets.local.is_open()) listeners_.emplace_back(core_.io, sockets.local.release(), true);
  }

  ~Impl() { stop(); }

  void run() {
    for (Listener& listener : listeners_) asio::co_spawn(core_.io, accept_loop(listener), asio::detached);
    asio::co_spawn(core_.io, tick_loop(), asio::detached);
    for (std::uint32_t i = 0; i < core_.options.io_threads; ++i) {
      threads_.emplace_back([this] { serve(); });
    }
  }

  void drain(std::chrono::milliseconds deadline);
  void stop();
  [[nodiscard]] ServerStats stats() const;
  [[nodiscard]] std::uint16_t port() const noexcept { return port_; }
  [[nodiscard]] ServerCore& core() noexcept { return core_; }

 private:
  struct Listener {
    Listener(asio::io_context& io, int fd, bool is_of_host) : socket(io, fd), is_local(is_of_host) {}
    asio::posix::stream_descriptor socket;  // owns the fd
    const bool is_local;                    // the local socket, at which anybody of the host may knock
  };

  asio::awaitable<void> accept_loop(Listener& listener);
  asio::awaitable<void> tick_loop();
  void serve();
  void tick(Clock::time_point now);
  [[nodiscard]] bool is_let_in(const Listener& listener, int fd) const;
  void admit(FileDescriptor fd);
  Status check_room(const Peer& peer) const;
  bool make_room_to_greet(const Peer& peer);
  std::shared_ptr<Peer> peer_of(const std::string& address);
  std::vector<std::shared_ptr<Connection>> connections();

  ServerCore core_;
  const std::uint16_t port_;
  std::list<Listener> listeners_;
  asio::steady_timer timer_;
  Clock::time_point next_stall_check_ = Clock::now() + kStallCheck;  // of the tick loop alone
  std::vector<std::thread> threads_;
  std::atomic<bool> stopping_{false};
  Mutex connections_mutex_;
  std::list<std::weak_ptr<Connection>> connections_ SR_GUARDED_BY(connections_mutex_);
  std::list<std::weak_ptr<Connection>> greeting_ SR_GUARDED_BY(connections_mutex_);  // some have said HELLO since
  std::map<std::string, std::weak_ptr<Peer>> peers_ SR_GUARDED_BY(connections_mutex_);
};

// A local socket has no mode, so this looks at the user; and what comes by it is plain.
bool Server::Impl::is_let_in(const Listener& listener, int fd) const {
  return !listener.is_local || (core_.tls() == nullptr && is_of_this_user(fd));
}

asio::awaitable<void> Server::Impl::accept_loop(Listener& listener) {
  asio::steady_timer pause(core_.io);
  while (!stopping_) {
    FileDescriptor fd(::accept4(listener.socket.native_handle(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    asio::error_code error;
    if (fd.is_open()) {
      try {
        if (is_let_in(listener, fd.get())) admit(std::move(fd));
        co_await asio::post(core_.io, asio::use_awaitable);  // it is looked at before the next one is taken
        continue;
      } catch (const std::exception&) {  // no memory for it: its descriptor is closed, and the next is waited for
      }
      errno = ENOMEM;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR || errno == ECONNABORTED) {
      co_await listener.socket.async_wait(asio::posix::stream_descriptor::wait_read,
                                          asio::redirect_error(asio::use_awaitable, error));
      if (error) co_return;
    } else {  // out of descriptors or memory: those that exist are served, new ones wait in the backlog
      pause.expires_after(std::chrono::milliseconds(100));
      co_await pause.async_wait(asio::redirect_error(asio::use_awaitable, error));
    }
  }
}

void Server::Impl::admit(FileDescriptor fd) {
  auto peer = peer_of(peer_address(fd.get()));
  auto stream = make_socket_stream(fd.release());
  const auto tls = peer->is_local() ? nullptr : core_.tls();
  if (Status status = check_room(*peer); !status.is_ok()) {
    const auto refusal = error_frame(FrameHeader{}, status);
    const iovec piece{const_cast<std::byte*>(refusal.data()), refusal.size()};
    if (!tls) static_cast<void>(stream->try_write(std::span(&piece, 1)));  // best effort: the peer may not read it
    return;
  }
  if (tls) stream = tls->accept(std::move(stream));
  if (!make_room_to_greet(*peer)) return;
  const auto connection = std::make_shared<Connection>(core_, std::move(stream), std::move(peer));
  {
    const MutexLock lock(connections_mutex_);
    connections_.push_back(connection);
    greeting_.push_back(connection);
  }
  connection->start();
}

Status Server::Impl::check_room(const Peer& peer) const {
  const std::uint32_t of_client = core_.options.max_client_connections;
  if (of_client == 0 || peer.connections < of_client) return Status::ok();
  return Status(Code::kResourceExhausted,
                peer.address + " has its " + std::to_string(of_client) + " connections to this shard already");
}

// Connections before their HELLO have a bound of their own, so that they take no seat from served ones. Beyond the
// bound the address that has most of them, this newcomer among them, loses its oldest one that keeps the shard waiting.
// Where all of them wait for the shard it loses its newest one, so that those before it are served. False: the
// newcomer.
bool Server::Impl::make_room_to_greet(const Peer& peer) {
  const std::uint32_t limit = std::max(kLeastGreeting, core_.options.max_connections / 8);
  if (core_.counters.connections_greeting < limit) return true;
  std::map<const Peer*, std::vector<std::shared_ptr<Connection>>> greeting;
  {
    const MutexLock lock(connections_mutex_);
    for (auto& connection : kept(greeting_, [](const Connection& each) { return each.is_greeting(); })) {
      greeting[&connection->peer()].push_back(std::move(connection));
    }
  }
  const auto count = [&peer](const auto& entry) { return entry.second.size() + (entry.first == &peer ? 1 : 0); };
  const auto most = std::max_element(greeting.begin(), greeting.end(),
                                     [&](const auto& left, const auto& right) { return count(left) < count(right); });
  if (most == greeting.end()) return true;
  const auto idle = std::find_if(most->second.begin(), most->second.end(),
                                 [](const auto& connection) { return !connection->is_in_handshake(); });
  if (idle == most->second.end() && most->first == &peer) return false;
  (idle == most->second.end() ? most->second.back() : *idle)->close();
  return true;
}

// Connections of one address share a Peer, as long as one of them lives; those of the local socket too.
std::shared_ptr<Peer> Server::Impl::peer_of(const std::string& address) {
  const MutexLock lock(connections_mutex_);
  if (auto known = peers_[address].lock()) return known;
  std::erase_if(peers_, [](const auto& entry) { return entry.second.expired(); });
  const std::uint64_t limit = core_.options.client_inflight_bytes;
  auto peer = std::make_shared<Peer>(address, limit);
  peers_[address] = peer;
  return peer;
}

std::vector<std::shared_ptr<Connection>> Server::Impl::connections() {
  const MutexLock lock(connections_mutex_);
  static_cast<void>(kept(greeting_, [](const Connection& each) { return each.is_greeting(); }));
  return kept(connections_, [](const Connection&) { return true; });
}

asio::awaitable<void> Server::Impl::tick_loop() {
  while (!stopping_) {
    asio::error_code error;
    timer_.expires_after(kTick);
    co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, error));
    if (error) co_return;
    try {
      tick(Clock::now());
    } catch (const std::exception&) {  // the next tick looks again
    }
  }
}

void Server::Impl::tick(Clock::time_point now) {
  core_.commits.expire(now);
  if (now < next_stall_check_) return;
  next_stall_check_ = now + kStallCheck;
  for (const auto& connection : connections()) connection->check_stall(now);
}

// What throws is over, and the thread serves the others: asio allows run() after an exception.
void Server::Impl::serve() {
  while (true) {
    try {
      core_.io.run();
      return;
    } catch (const std::exception&) {
    }
  }
}

void Server::Impl::drain(std::chrono::milliseconds deadline) {
  core_.draining = true;
  const auto until = Clock::now() + deadline;
  while (Clock::now() < until) {
    core_.commits.fail_parked(Status(Code::kUnavailable, "the shard is draining"));
    if (core_.counters.requests_active == 0 && core_.commits.stats().pulls_waiting == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Server::Impl::stop() {
  if (stopping_.exchange(true)) return;
  core_.draining = true;
  core_.commits.fail_parked(Status(Code::kUnavailable, "the shard is stopping"));
  asio::post(core_.io, [this] {
    for (Listener& listener : listeners_) listener.socket.close();
    timer_.cancel();
  });
  for (const auto& connection : connections()) connection->close();
  // Coroutines end by themselves once their sockets do; one that cannot is dropped with the event loop.
  const auto until = Clock::now() + std::chrono::seconds(2);
  while (core_.counters.connections_open > 0 && Clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (const auto& connection : connections()) connection->close();
  }
  core_.io.stop();
  for (std::thread& thread : threads_) thread.join();
  core_.bulk.join();
  if (core_.handshakes != nullptr) core_.handshakes->join();
  if (core_.hints != nullptr) core_.hints->stop();
  if (core_.disk != nullptr) core_.disk->join();
}

ServerStats Server::Impl::stats() const {
  const Counters& counters = core_.counters;
  return {.connections_open = counters.connections_open,
          .connections_local = counters.connections_local,
          .connections_total = counters.connections_total,
          .frames_received = counters.frames_received,
          .frames_refused = counters.frames_refused,
          .access_refused = counters.access_refused,
          .bytes_received = counters.bytes_received,
          .bytes_sent = counters.bytes_sent,
          .rows_pulled = counters.rows_pulled,
          .rows_written = counters.rows_written,
          .hinted_keys = core_.hints == nullptr ? 0 : core_.hints->taken(),
          .hinted_keys_dropped = core_.hints == nullptr ? 0 : core_.hints->dropped(),
          .hinted_keys_declined = core_.hints == nullptr ? 0 : core_.hints->declined(),
          .inflight_bytes = core_.inflight.used(),
          .reply_bytes = core_.replies.used(),
          .connections_too_slow = counters.connections_too_slow,
          .lane_bytes = counters.lane_bytes,
          .lane_sent = counters.lane_sent,
          .lane_received = counters.lane_received,
          .requests_active = counters.requests_active,
          .commits = core_.commits.stats(),
          .job_steps = core_.commits.highest_steps(),
          .staleness = core_.staleness.by_table(),
          .request_times = core_.request_times.all()};
}

Result<std::unique_ptr<Server>> Server::start(const ServerOptions& options, std::shared_ptr<Store> store) {
  SR_RETURN_IF_ERROR(check(options));
  auto listener = listen_tcp(options.host, options.port);
  if (!listener.is_ok()) return listener.status();
  Impl::Sockets sockets{.tcp = FileDescriptor(listener.value()), .local = {}};
  if (options.is_local) {  // where the system gives none, clients of this host come by TCP
    const auto port = local_port(sockets.tcp.get());
    const auto local = listen_local(local_socket_name(options.cluster_id, options.shard_index, port));
    if (local.is_ok()) sockets.local = FileDescriptor(local.value());
  }
  std::unique_ptr<Server> server(new Server(std::make_unique<Impl>(options, std::move(store), std::move(sockets))));
  server->impl_->run();
  return server;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Server::~Server() = default;
std::uint16_t Server::port() const noexcept { return impl_->port(); }

Status Server::set_route(std::uint32_t route_epoch, std::span<const std::uint16_t> slot_owner) {
  const std::uint32_t slots = impl_->core().store->options().slot_count;
  if (slot_owner.size() != slots) {
    return Status(Code::kInvalidArgument, "slot_owner: " + std::to_string(slot_owner.size()) +
                                              " slots; this shard's store has " + std::to_string(slots));
  }
  SR_RETURN_IF_ERROR(check_slot_owner(slot_owner, 65536));
  impl_->core().set_route(route_epoch, {slot_owner.begin(), slot_owner.end()});
  return Status::ok();
}

Status Server::refuse_tables(const Status& refusal, std::vector<std::uint32_t> tables,
                             std::chrono::milliseconds deadline) {
  ServerCore& core = impl_->core();
  const bool refuses = !tables.empty();
  core.set_refusal(refusal, std::move(tables));
  if (!refuses) return Status::ok();
  const auto until = Clock::now() + deadline;
  do {
    core.commits.fail_parked(refusal);
    if (core.counters.requests_dispatched == 0) return Status::ok();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  } while (Clock::now() < until);
  return {Code::kDeadlineExceeded,
          "requests for rows were still under way after " + std::to_string(deadline.count()) + " ms"};
}

Status Server::set_job(const JobSpec& spec) { return impl_->core().commits.set_job(spec); }
Result<std::vector<WorkerReport>> Server::freeze_job(std::uint32_t job_id, std::uint64_t operation,
                                                     const std::vector<WorkerKey>& fence,
                                                     std::optional<std::chrono::milliseconds> lease) {
  return impl_->core().commits.freeze(job_id, operation, fence, lease);
}
Status Server::drop_job(std::uint32_t job_id, std::uint64_t operation) {
  SR_RETURN_IF_ERROR(impl_->core().commits.drop_job(job_id, operation));
  impl_->core().store->forget_job(job_id);
  return Status::ok();
}
Result<Server::Cut> Server::cut(const std::vector<CutTarget>& targets, std::chrono::milliseconds deadline,
                                SnapshotOptions options) {
  Cut cut;
  auto jobs = impl_->core().commits.cut(targets, Clock::now() + deadline, [&] {
    auto rows = impl_->core().store->snapshot(std::move(options));
    if (rows.is_ok()) cut.rows = std::move(rows).value();
    return rows.is_ok() ? Status::ok() : rows.status();
  });
  if (!jobs.is_ok()) return jobs.status();
  cut.jobs = std::move(jobs).value();
  return cut;
}
void Server::install_jobs(const std::vector<JobImage>& images) { impl_->core().commits.install(images); }
void Server::count_write(std::uint32_t table_id) { impl_->core().commits.count_write(table_id); }
void Server::set_tls(std::shared_ptr<const TlsContext> tls) { impl_->core().set_tls(std::move(tls)); }
AccessList& Server::access() noexcept { return impl_->core().access; }
ServerStats Server::stats() const { return impl_->stats(); }
std::vector<LostRange> Server::lost_commits() const { return impl_->core().commits.lost(); }
RequestLog& Server::request_log() noexcept { return impl_->core().request_log; }
HotKeys::Report Server::hot_keys(std::size_t most) const { return impl_->core().hot_keys.report(most); }
ServedModels& Server::models() noexcept { return impl_->core().models; }
void Server::drain(std::chrono::milliseconds deadline) { impl_->drain(deadline); }
void Server::stop() { impl_->stop(); }

}  // namespace sparserow::rpc

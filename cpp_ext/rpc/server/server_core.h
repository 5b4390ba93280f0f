// What the connections of one server share: the store, the commit log, budgets, counters and threads.
//
// Lock order: CommitLog's mutex and Store's locks are leaves; FairBudget's, Seats' and the route's mutex too.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "commit/commit_log.h"
#include "rpc/observe/staleness_histogram.h"
#include "rpc/server/access.h"
#include "rpc/server/buffer_pool.h"
#include "rpc/server/fair_budget.h"
#include "rpc/server/hints.h"
#include "rpc/server/seats.h"
#include "rpc/server/served_models.h"
#include "rpc/server/server.h"
#include "rpc/transport/event_loop.h"
#include "store/store.h"
#include "util/mutex.h"

namespace sparserow::rpc {

// Where connections come from, and what all of them hold at once.
struct Peer {
  // inflight_limit: 0 for none.
  Peer(std::string from, std::uint64_t inflight_limit) : address(std::move(from)) {
    if (inflight_limit != 0) inflight.emplace(inflight_limit);
  }
  [[nodiscard]] bool is_local() const { return address == kLocalPeer; }
  const std::string address;  // kLocalPeer: of the local socket
  std::atomic<std::uint32_t> connections{0};
  std::optional<FairBudget> inflight;
};

struct Route {
  std::uint32_t epoch = 0;
  std::vector<std::uint16_t> slot_owner;      // empty: ownership is not checked
  Status refusal;                             // of requests for rows of these tables
  std::vector<std::uint32_t> refused_tables;  // ids, rising
};

struct Counters {
  std::atomic<std::uint64_t> connections_open{0};
  std::atomic<std::uint64_t> connections_total{0};
  std::atomic<std::uint64_t> connections_local{0};     // of connections_open, by the local socket
  std::atomic<std::uint64_t> connections_greeting{0};  // that have not said HELLO
  std::atomic<std::uint64_t> frames_received{0};
  std::atomic<std::uint64_t> frames_refused{0};
  std::atomic<std::uint64_t> access_refused{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> bytes_sent{0};
  std::atomic<std::uint64_t> rows_pulled{0};
  std::atomic<std::uint64_t> rows_written{0};
  std::atomic<std::uint64_t> connections_too_slow{0};
  std::atomic<std::uint64_t> lane_bytes{0};     // of clients' memory that is mapped
  std::atomic<std::uint64_t> lane_sent{0};      // bytes of replies that were written there
  std::atomic<std::uint64_t> lane_received{0};  // bytes of rows that were read there
  std::atomic<std::uint64_t> requests_active{0};
  std::atomic<std::uint64_t> requests_dispatched{0};  // of these, the ones that may touch rows
};

// Counts one request for as long as it lives.
class CountedRequest {
 public:
  explicit CountedRequest(std::atomic<std::uint64_t>& counter) : counter_(counter) { ++counter_; }
  CountedRequest(const CountedRequest&) = delete;
  CountedRequest& operator=(const CountedRequest&) = delete;
  ~CountedRequest() { --counter_; }

 private:
  std::atomic<std::uint64_t>& counter_;
};

// Counts the memory of one connection's lane for as long as it lives.
class CountedLane {
 public:
  explicit CountedLane(std::atomic<std::uint64_t>& counter) : counter_(counter) {}
  CountedLane(const CountedLane&) = delete;
  CountedLane& operator=(const CountedLane&) = delete;
  ~CountedLane() { counter_ -= bytes_; }

  // False where `limit` would be passed.
  [[nodiscard]] bool take(std::uint64_t bytes, std::uint64_t limit) {
    std::uint64_t used = counter_.load();
    do {
      if (bytes > limit || used > limit - bytes) return false;
    } while (!counter_.compare_exchange_weak(used, used + bytes));
    bytes_ += bytes;
    return true;
  }

 private:
  std::atomic<std::uint64_t>& counter_;
  std::uint64_t bytes_ = 0;
};

// Declared in the order of need: the event loop goes first when a server ends, taking the connections along.
struct ServerCore {
  ServerCore(const ServerOptions& server_options, std::shared_ptr<Store> server_store);

  // Runs work(part) for every part on the I/O threads that are free and on this one; returns when all ended, and throws
  // then what the first part threw. An I/O thread serves others between two parts, so a part should be short.
  void parallel_for(std::uint32_t parts, const std::function<void(std::uint32_t)>& work);
  [[nodiscard]] std::shared_ptr<const Route> route() const;
  // What is refused stays refused.
  void set_route(std::uint32_t epoch, std::vector<std::uint16_t> slot_owner);
  void set_refusal(const Status& refusal, std::vector<std::uint32_t> tables);
  // The TLS of new connections; null: they are plain. Once it was set there is a thread for handshakes.
  [[nodiscard]] std::shared_ptr<const TlsContext> tls() const;
  void set_tls(std::shared_ptr<const TlsContext> tls);

  const ServerOptions options;
  const std::shared_ptr<Store> store;
  const std::uint32_t incarnation;  // random, not 0
  ServedModels models;
  AccessList access;
  std::atomic<bool> draining{false};
  Counters counters;
  StalenessHistogram staleness;
  RequestTimes request_times;
  HotKeys hot_keys;
  RequestLog request_log;
  FairBudget inflight;  // request bodies
  FairBudget parked;    // pulls that wait for the clock
  FairBudget replies;   // replies from before they are made until the peer has taken them
  Seats seats;
  BufferPool buffers;
  asio::io_context io;
  CommitLog commits;
  asio::thread_pool bulk;                         // of writes that would keep an I/O thread for long
  std::unique_ptr<asio::thread_pool> disk;        // of requests that may wait for the SSD; null without one
  std::unique_ptr<HintQueue> hints;               // null without an SSD
  std::unique_ptr<asio::thread_pool> handshakes;  // of TLS; null before the first set_tls()

 private:
  mutable Mutex route_mutex_;
  std::shared_ptr<const Route> route_ SR_GUARDED_BY(route_mutex_);
  std::shared_ptr<const TlsContext> tls_ SR_GUARDED_BY(route_mutex_);
};

}  // namespace sparserow::rpc

#include "rpc/server/server_core.h"

#include <algorithm>
#include <exception>
#include <random>

#include "util/mutex.h"
#include "util/step_back.h"

namespace sparserow::rpc {
namespace {

constexpr std::size_t kKeptBufferBytes = 256u << 20;
constexpr std::uint32_t kFewestBulkThreads = 2;  // a further such write waits for one of them
constexpr std::uint32_t kBulkShare = 4;          // one for so many I/O threads, which help with the parts of a write
constexpr int kNiceOfHandshakes = 5;             // a quarter of a CPU that I/O threads want as well

// One parallel_for under way. Helpers that come late find no part left and touch nothing of the caller's.
struct ParallelWork {
  std::atomic<std::uint32_t> next{0};
  std::uint32_t parts = 0;
  const std::function<void(std::uint32_t)>* work = nullptr;
  Mutex mutex;
  CondVar finished;
  std::uint32_t done SR_GUARDED_BY(mutex) = 0;
  std::exception_ptr error SR_GUARDED_BY(mutex);  // the first that a part threw

  // False when no part is left.
  bool run_one() {
    const std::uint32_t part = next.fetch_add(1);
    if (part >= parts) return false;
    std::exception_ptr thrown;
    try {
      (*work)(part);
    } catch (...) {
      thrown = std::current_exception();
    }
    const MutexLock lock(mutex);
    if (thrown && !error) error = thrown;
    if (++done == parts) finished.notify_all();
    return true;
  }
};

// One part at a time: requests that came meanwhile stand before the next one.
void help(asio::io_context& io, std::shared_ptr<ParallelWork> shared) {
  try {
    asio::post(io, [&io, shared = std::move(shared)] {
      if (shared->run_one() && shared->next < shared->parts) help(io, shared);
    });
  } catch (const std::exception&) {  // the caller does the parts for which no helper could be posted
  }
}

}  // namespace

ServerCore::ServerCore(const ServerOptions& server_options, std::shared_ptr<Store> server_store)
    : options(server_options),
      store(std::move(server_store)),
      incarnation(std::max(1u, std::random_device{}())),
      inflight(options.inflight_budget_bytes),
      parked(options.kept_budget_bytes),
      replies(options.reply_budget_bytes),
      seats(options.max_connections),
      buffers(kKeptBufferBytes),
      io(static_cast<int>(options.io_threads)),
      commits(*store,
              {.kept_budget_bytes = options.kept_budget_bytes,
               .parts = options.io_threads,
               .parallel_for = [this](std::uint32_t parts,
                                      const std::function<void(std::uint32_t)>& work) { parallel_for(parts, work); }}),
      bulk(std::max(kFewestBulkThreads, options.io_threads / kBulkShare)),
      route_(std::make_shared<const Route>()) {
  access.set(options.grants);
  if (options.tls != nullptr) set_tls(options.tls);
  if (!store->has_ssd()) return;
  disk = std::make_unique<asio::thread_pool>(options.disk_threads);
  hints = std::make_unique<HintQueue>(*store, *disk);
}

void ServerCore::parallel_for(std::uint32_t parts, const std::function<void(std::uint32_t)>& work) {
  if (parts == 0) return;
  const auto shared = std::make_shared<ParallelWork>();
  shared->parts = parts;
  shared->work = &work;
  const std::uint32_t helpers = std::min(parts, options.io_threads) - 1;
  for (std::uint32_t i = 0; i < helpers; ++i) help(io, shared);
  while (shared->run_one()) {
  }
  const MutexLock lock(shared->mutex);
  shared->finished.wait(shared->mutex, [&]() SR_REQUIRES(shared->mutex) { return shared->done == parts; });
  if (shared->error) std::rethrow_exception(shared->error);
}

std::shared_ptr<const Route> ServerCore::route() const {
  const MutexLock lock(route_mutex_);
  return route_;
}

void ServerCore::set_route(std::uint32_t epoch, std::vector<std::uint16_t> slot_owner) {
  const MutexLock lock(route_mutex_);
  route_ = std::make_shared<const Route>(Route{epoch, std::move(slot_owner), route_->refusal, route_->refused_tables});
}

void ServerCore::set_refusal(const Status& refusal, std::vector<std::uint32_t> tables) {
  std::sort(tables.begin(), tables.end());
  const MutexLock lock(route_mutex_);
  route_ = std::make_shared<const Route>(Route{route_->epoch, route_->slot_owner, refusal, std::move(tables)});
}

std::shared_ptr<const TlsContext> ServerCore::tls() const {
  const MutexLock lock(route_mutex_);
  return tls_;
}

void ServerCore::set_tls(std::shared_ptr<const TlsContext> tls) {
  const MutexLock lock(route_mutex_);
  if (tls != nullptr && handshakes == nullptr) {
    handshakes = std::make_unique<asio::thread_pool>(1);
    asio::post(*handshakes, [] { step_back(kNiceOfHandshakes); });
  }
  tls_ = std::move(tls);
}

}  // namespace sparserow::rpc

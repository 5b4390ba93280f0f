// PullHandler's part for pulls that wait for the clock of their job.
#include <cstring>

#include "rpc/server/pull_handler.h"
#include "util/caught.h"
#include "util/mutex.h"

namespace sparserow::rpc {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMostParked = 1024;   // pulls of one connection that wait for the clock
constexpr std::uint64_t kParkedBytes = 1024;  // that a parked pull takes beside its body

}  // namespace

// Asks the clock. A pull that must wait keeps its keys and gives its in-flight bytes back.
Outcome PullHandler::park_until_readable(const std::shared_ptr<PullRequest>& pull, Body& body) {
  struct Wait {
    explicit Wait(std::shared_ptr<PullRequest> asked) : pull(std::move(asked)) {}
    Mutex mutex;
    bool answered SR_GUARDED_BY(mutex) = false;
    bool is_parked SR_GUARDED_BY(mutex) = false;
    Status status SR_GUARDED_BY(mutex);
    // Null once its request is refused: the clock answers it no more.
    std::shared_ptr<PullRequest> pull SR_GUARDED_BY(mutex);
  };
  const auto wait = std::make_shared<Wait>(pull);
  const FrameHeader& header = pull->header;
  const Status room = charge_parked(*pull, body.bytes.size() + kParkedBytes + pull->parts.size() * sizeof(PullPart));
  // Without room a pull that must wait is not kept.
  const auto until = room.is_ok() ? pull->deadline : Clock::now();
  core_.commits.when_readable(
      header.job_id, header.worker_id, header.worker_epoch, header.step, until,
      [this, wait, weak = connection_](Status status) {
        const MutexLock lock(wait->mutex);
        wait->answered = true;
        wait->status = std::move(status);
        if (!wait->is_parked) return;
        if (const auto connection = weak.lock()) resume_parked(connection, wait->pull, wait->status);
      },
      this);
  has_parked_ = true;
  {
    const MutexLock lock(wait->mutex);
    if (wait->answered) {
      pull->parked.reset();
      const bool must_wait = wait->status.code() == Code::kDeadlineExceeded;
      return Outcome::of(must_wait && !room.is_ok() ? room : wait->status);
    }
  }
  try {
    keep_keys(*pull, body);
  } catch (...) {  // the log knows the pull until its deadline; what it has goes now
    const MutexLock lock(wait->mutex);
    wait->pull.reset();
    pull->parked.reset();
    throw;
  }
  const MutexLock lock(wait->mutex);
  if (wait->answered) return Outcome::of(wait->status);
  wait->is_parked = true;
  ++parked_;
  if (core_.disk != nullptr) fetch_while_parked(pull);
  return Outcome::parked();
}

// Brings the rows of a pull to memory while it waits. Throws nothing, because the pull is parked already: one that is
// refused too would be answered twice. Without memory for it the pull reads its rows once it is readable.
void PullHandler::fetch_while_parked(const std::shared_ptr<PullRequest>& pull) noexcept {
  try {
    // The keys as they are now: the strand takes those of rows that have changed alone once the pull is readable.
    std::vector<std::pair<std::uint32_t, std::span<const std::uint64_t>>> wanted;
    for (const PullPart& part : pull->parts) wanted.emplace_back(part.descriptor.table_id, part.keys);
    asio::post(*core_.disk, [&core = core_, pull, wanted = std::move(wanted)] {
      // The pull itself reports an error. An exception would end the process, because this is no coroutine.
      try {
        for (const auto& [table_id, keys] : wanted) {
          static_cast<void>(core.store->fetch_to_memory(table_id, keys, Store::FetchCause::kPull));
        }
      } catch (const std::exception&) {
      }
    });
  } catch (const std::exception&) {
  }
}

void PullHandler::keep_keys(PullRequest& pull, Body& body) {
  if (body.buffer.data() != nullptr) {
    pull.body = std::move(body.buffer);
    body.release_charges();
    return;
  }
  pull.body = core_.buffers.acquire(body.bytes.size());
  std::memcpy(pull.body.data(), body.bytes.data(), body.bytes.size());
  for (PullPart& part : pull.parts) {
    const auto offset = reinterpret_cast<const std::byte*>(part.keys.data()) - body.bytes.data();
    part.keys = {reinterpret_cast<const std::uint64_t*>(pull.body.data() + offset), part.keys.size()};
    if (!part.known.empty()) part.known = {part.keys.data() + part.keys.size(), part.keys.size()};
  }
}

Status PullHandler::charge_parked(PullRequest& pull, std::uint64_t bytes) {
  if (parked_ >= kMostParked) {
    return {Code::kResourceExhausted,
            "this connection has " + std::to_string(kMostParked) + " pulls already that wait for the clock"};
  }
  return accounts_.charge_parked(pull.parked, bytes);
}

void PullHandler::forget_parked() {
  if (has_parked_) core_.commits.forget(this);
}

// The work is posted: the commit that made the pull readable may be running on this very strand.
void PullHandler::resume_parked(const std::shared_ptr<void>& connection, const std::shared_ptr<PullRequest>& pull,
                                const Status& status) {
  try {
    asio::post(strand_, [this, connection, pull, status] {
      const auto finish = [this, connection, pull, status]() -> Task<void> { co_await finish_parked(pull, status); };
      try {
        asio::co_spawn(strand_, finish, asio::detached);
      } catch (const std::exception&) {  // no memory for the coroutine either: the peer asks again
        io_.close();
      }
    });
  } catch (const std::exception&) {  // the commit that made the pull readable must not fail for it
    io_.close();
  }
}

Task<void> PullHandler::finish_parked(std::shared_ptr<PullRequest> pull, Status status) {
  const CountedRequest active(core_.counters.requests_active);
  const CountedRequest counted(core_.counters.requests_dispatched);
  --parked_;
  pull->parked.reset();
  bool is_alive = !io_.is_closed();
  for (const PullPart& part : pull->parts) {
    if (status.is_ok()) status = check_refusal(core_, part.descriptor.table_id);
  }
  if (is_alive && status.is_ok()) {
    try {
      is_alive = co_await send_rows(*pull);
    } catch (...) {  // nothing was sent
      status = caught_status("the reply");
    }
  }
  if (is_alive && !status.is_ok()) is_alive = co_await send_refusal(*pull, status);
  note_request(core_, peer_, RequestTimes::Kind::kWaitedPull, pull->header, status, pull->arrival);
  if (!is_alive) close_();
}

}  // namespace sparserow::rpc

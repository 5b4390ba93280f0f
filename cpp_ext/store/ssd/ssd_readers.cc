#include "store/ssd/ssd_readers.h"

#include <algorithm>
#include <system_error>

#include "util/step_back.h"

namespace sparserow {
namespace {

constexpr int kNice = 5;

}  // namespace

void take_ssd_priority() noexcept { step_back(kNice); }

SsdReaders::~SsdReaders() {
  {
    const MutexLock lock(mutex_);
    is_ending_ = true;
  }
  asked_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void SsdReaders::work_on(Job& job) {
  for (std::size_t part = job.next++; part < job.parts; part = job.next++) (*job.work)(part);
}

void SsdReaders::run(std::size_t parts, std::size_t helpers, const std::function<void(std::size_t)>& work) {
  const auto job = std::make_shared<Job>();
  job->work = &work;
  job->parts = parts;
  const std::size_t places = parts > 1 ? std::min({helpers, parts - 1, most_threads_}) : 0;
  if (places > 0) {
    const MutexLock lock(mutex_);
    start(places);
    job->places = places;
    jobs_.push_back(job);
  }
  for (std::size_t i = 0; i < places; ++i) asked_.notify_one();
  work_on(*job);
  if (places == 0) return;
  MutexLock lock(mutex_);
  std::erase(jobs_, job);
  left_.wait(mutex_, [&job] { return job->helpers == 0; });
}

// As many as there are to be; fewer where the system has no more of them.
void SsdReaders::start(std::size_t threads) {
  try {
    while (threads_.size() < threads) threads_.emplace_back([this] { help(); });
  } catch (const std::system_error&) {
  }
}

void SsdReaders::help() {
  take_ssd_priority();
  MutexLock lock(mutex_);
  for (;;) {
    asked_.wait(mutex_, [this]() SR_REQUIRES(mutex_) { return is_ending_ || !jobs_.empty(); });
    if (is_ending_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    ++job->helpers;
    if (--job->places == 0) jobs_.pop_front();
    lock.unlock();
    work_on(*job);
    lock.lock();
    std::erase(jobs_, job);
    if (--job->helpers == 0) left_.notify_all();
  }
}

}  // namespace sparserow

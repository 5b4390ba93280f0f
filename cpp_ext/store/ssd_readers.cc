#include "store/ssd_readers.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sparserow {
namespace {

constexpr int kNice = 5;  // rows in memory are not to wait for a CPU because others are read

}  // namespace

SsdReaders::SsdReaders(std::size_t threads) {
  for (std::size_t i = 0; i < threads; ++i) threads_.emplace_back([this] { help(); });
}

SsdReaders::~SsdReaders() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  asked_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void SsdReaders::work_on(Job& job) {
  for (std::size_t part = job.next++; part < job.parts; part = job.next++) (*job.work)(part);
}

void SsdReaders::run(std::size_t parts, const std::function<void(std::size_t)>& work) {
  const auto job = std::make_shared<Job>();
  job->work = &work;
  job->parts = parts;
  if (parts > 1) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(job);
    }
    for (std::size_t i = 1; i < parts && i <= threads_.size(); ++i) asked_.notify_one();
  }
  work_on(*job);
  if (parts <= 1) return;
  std::unique_lock lock(mutex_);
  std::erase(jobs_, job);
  left_.wait(lock, [&job] { return job->helpers == 0; });
}

void SsdReaders::help() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNice);  // of this thread; a wish
  std::unique_lock lock(mutex_);
  for (;;) {
    asked_.wait(lock, [this] { return is_ending_ || !jobs_.empty(); });
    if (is_ending_) return;
    const std::shared_ptr<Job> job = jobs_.front();
    ++job->helpers;
    lock.unlock();
    work_on(*job);
    lock.lock();
    std::erase(jobs_, job);
    if (--job->helpers == 0) left_.notify_all();
  }
}

}  // namespace sparserow

#include "util/step_back.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace sparserow {
namespace {

constexpr int kMostNice = 19;
constexpr std::uint64_t kSliceNanoseconds = 100'000;  // the least that Linux has

// As the kernel's sched_attr of 48 bytes, which not every C library declares.
struct ThreadSchedule {
  std::uint32_t bytes = sizeof(ThreadSchedule);
  std::uint32_t policy = SCHED_OTHER;
  std::uint64_t flags = 0;
  std::int32_t nice = 0;
  std::uint32_t priority = 0;
  std::uint64_t runtime = kSliceNanoseconds;  // of SCHED_OTHER it is the slice
  std::uint64_t deadline = 0;
  std::uint64_t period = 0;
};
static_assert(sizeof(ThreadSchedule) == 48);

}  // namespace

void step_back(int nice) noexcept {
  const auto thread = static_cast<id_t>(::syscall(SYS_gettid));
  const int wished = std::min(kMostNice, ::getpriority(PRIO_PROCESS, static_cast<id_t>(::getpid())) + nice);
  ThreadSchedule schedule;
  schedule.nice = wished;
  if (::syscall(SYS_sched_setattr, 0, &schedule, 0) != 0) ::setpriority(PRIO_PROCESS, thread, wished);
}

}  // namespace sparserow

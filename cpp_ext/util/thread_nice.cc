#include "util/thread_nice.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace sparserow {

void set_thread_nice(int nice) noexcept { ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), nice); }

}  // namespace sparserow

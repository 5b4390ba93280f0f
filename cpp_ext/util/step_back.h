// How far a thread steps back behind others of the machine that want its CPU.
#pragma once

namespace sparserow {

// Gives the calling thread `nice`, from 0 to 19, more niceness than the process's first thread has, and shortens its
// slices: niceness says how much of a CPU the thread has beside others, and a slice how long one that wakes may wait
// for it. Both are wishes, which the system may refuse; before Linux 6.12 all slices are alike. Idempotent.
void step_back(int nice) noexcept;

}  // namespace sparserow

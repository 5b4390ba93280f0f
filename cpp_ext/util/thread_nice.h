// How far a thread steps back behind others of the machine that want its CPU.
#pragma once

namespace sparserow {

// Sets the niceness of the calling thread, from 0 to 19. It is a wish: the system may refuse it.
void set_thread_nice(int nice) noexcept;

}  // namespace sparserow

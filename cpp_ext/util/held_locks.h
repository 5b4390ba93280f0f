// The locks that each thread has, in builds that check them (SPARSEROW_CHECK_LOCKS, with sanitizers): a thread that
// takes one twice ends the process with a word. Other builds keep no account.
#pragma once

#ifdef SPARSEROW_CHECK_LOCKS
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#endif

namespace sparserow {

#ifdef SPARSEROW_CHECK_LOCKS

inline std::vector<const void*>& held_locks() {
  thread_local std::vector<const void*> held;
  return held;
}

inline void note_lock(const void* lock) {
  std::vector<const void*>& held = held_locks();
  if (std::find(held.begin(), held.end(), lock) != held.end()) {
    std::fputs("a thread takes a lock that it has\n", stderr);
    std::abort();
  }
  held.push_back(lock);
}

inline void note_unlock(const void* lock) {
  std::vector<const void*>& held = held_locks();
  const auto found = std::find(held.rbegin(), held.rend(), lock);
  if (found != held.rend()) held.erase(std::next(found).base());
}

#else

inline void note_lock(const void*) noexcept {}
inline void note_unlock(const void*) noexcept {}

#endif

}  // namespace sparserow

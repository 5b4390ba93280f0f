// The locks that each thread has, in builds that check them (SPARSEROW_CHECK_LOCKS, with sanitizers): a thread that
// takes one twice ends the process with a word. Other builds keep no account. And clang's annotations of locks.
#pragma once

#if defined(__clang__)
#define SR_ANNOTATION(x) __attribute__((x))
#else
#define SR_ANNOTATION(x)
#endif
#define SR_CAPABILITY(x) SR_ANNOTATION(capability(x))
#define SR_ACQUIRE(...) SR_ANNOTATION(acquire_capability(__VA_ARGS__))
#define SR_ACQUIRE_SHARED(...) SR_ANNOTATION(acquire_shared_capability(__VA_ARGS__))
#define SR_RELEASE(...) SR_ANNOTATION(release_capability(__VA_ARGS__))
#define SR_RELEASE_SHARED(...) SR_ANNOTATION(release_shared_capability(__VA_ARGS__))
#define SR_TRY_ACQUIRE(...) SR_ANNOTATION(try_acquire_capability(__VA_ARGS__))

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

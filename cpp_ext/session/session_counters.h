// The counters of a session. SR_SESSION_COUNTERS is the only list of them in C++: the atomic counters, their copy in
// SessionStats and the dictionary for Python follow from it. worker/session/session_stats.py has one line for each,
// with its sentence for documents and metrics.
#pragma once

#include <atomic>
#include <cstdint>

namespace sparserow {

#define SR_SESSION_COUNTERS(COUNTER)                                                             \
  COUNTER(steps_committed)                                                                       \
  COUNTER(steps_aborted)                                                                         \
  COUNTER(refused_steps) /* steps that have their quorum without this worker */                  \
  COUNTER(missed_steps)  /* steps that this worker passed over after a refusal */                \
  COUNTER(rows_pulled)                                                                           \
  COUNTER(rows_pushed)                                                                           \
  COUNTER(pulls)             /* calls to the shards */                                           \
  COUNTER(pulls_merged)      /* those of them that serve several lookups of a forward */         \
  COUNTER(lookups_missed)    /* lookups that pull although a merged pull went before */          \
  COUNTER(nonfinite_rows)    /* summed gradients with NaN or Inf */                              \
  COUNTER(clipped_rows)      /* summed gradients that were shortened */                          \
  COUNTER(rows_prefetched)   /* rows that were pulled before their step began */                 \
  COUNTER(rows_hinted)       /* rows that shards with an SSD fetch to memory after a hint */     \
  COUNTER(rows_deferred)     /* rows that a prefetch leaves to their step, which changes them */ \
  COUNTER(rows_revalidated)  /* prefetched rows whose versions were checked at their step */     \
  COUNTER(rows_refreshed)    /* those of them that had changed and were sent again */            \
  COUNTER(bytes_refreshed)   /* float32 weights of rows_refreshed */                             \
  COUNTER(cache_hits)        /* rows that a step took from the cache without asking */           \
  COUNTER(cache_misses)      /* rows that the cache did not have */                              \
  COUNTER(cache_revalidated) /* cached rows whose versions were checked */                       \
  COUNTER(cache_refreshed)   /* those of them that had changed and were sent again */            \
  COUNTER(cache_bytes_saved) /* float32 weights of hits and of rows that had not changed */

// Values of one moment.
struct SessionStats {
#define SR_COUNTER(name) std::uint64_t name = 0;
  SR_SESSION_COUNTERS(SR_COUNTER)
#undef SR_COUNTER

  // Calls visit(name, value) for each counter, in the order of the list.
  template <typename Visit>
  void for_each(Visit&& visit) const {
#define SR_COUNTER(name) visit(#name, name);
    SR_SESSION_COUNTERS(SR_COUNTER)
#undef SR_COUNTER
  }
};

// Any thread may add to a counter. load() reads one after another: the values need not be of the same instant.
struct SessionCounters {
#define SR_COUNTER(name) std::atomic<std::uint64_t> name{0};
  SR_SESSION_COUNTERS(SR_COUNTER)
#undef SR_COUNTER

  [[nodiscard]] SessionStats load() const noexcept {
    SessionStats stats;
#define SR_COUNTER(name) stats.name = name.load();
    SR_SESSION_COUNTERS(SR_COUNTER)
#undef SR_COUNTER
    return stats;
  }
};

#undef SR_SESSION_COUNTERS

}  // namespace sparserow

// The last commits and writes by key of a worker to one shard, kept so that they can be sent again to a process that
// takes the shard's place. That process has what a checkpoint had; later commits are gone unless a worker kept them.
//
// The buffer keeps a commit from its PREPARE on; the commit is *decided* once a COMMIT was sent. The newest one always
// stays, older ones as far as the budget goes. The shard answers again what it has applied, so the buffer need not know
// which commits are saved. The sequences of evicted writes by key stay, so that the shard can count lost ones. The
// shard itself knows which steps are missing.
//
// Not thread-safe: the client's mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "rpc/wire/frame.h"

namespace sparserow::rpc {

struct BufferedCommit {
  FrameHeader header;  // of PREPARE, of a COMMIT in one phase, ASSIGN or DELETE
  std::vector<std::byte> body;
  bool decided = false;

  BufferedCommit() = default;
  // Copies the body out of its pieces.
  BufferedCommit(const FrameHeader& frame, const std::vector<iovec>& pieces);
};

class ReplayBuffer {
 public:
  explicit ReplayBuffer(std::uint64_t budget_bytes) : budget_bytes_(budget_bytes) {}

  // Adds a commit under its header's sequence, in place of an earlier one of that sequence.
  void add(BufferedCommit commit);
  void decide(std::uint64_t sequence);
  // It was aborted.
  void drop(std::uint64_t sequence);
  void clear();
  // The first one of this or a later sequence; null when there is none.
  [[nodiscard]] const BufferedCommit* from(std::uint64_t sequence) const;
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  // Sequences of writes by key that were evicted, oldest first, the newest kMaxEvicted. They stay when a shard was
  // notified: its process may end before it saves the count, and the next one counts them from its own checkpoint.
  struct Evicted {
    FrameHeader header;  // of the last
    std::deque<std::uint64_t> sequences;
  };
  [[nodiscard]] const Evicted& evicted() const noexcept { return evicted_; }

 private:
  static constexpr std::size_t kMaxEvicted = std::size_t{1} << 16;
  using Commits = std::map<std::uint64_t, BufferedCommit>;
  void erase(Commits::iterator commit);

  const std::uint64_t budget_bytes_;
  Commits commits_;  // by sequence
  std::uint64_t bytes_ = 0;
  Evicted evicted_;
};

}  // namespace sparserow::rpc

// The last commits and writes by key of a worker to one shard, kept so that they can be sent again to a process that
// takes the shard's place: it has what a checkpoint had, and the commits after that are gone unless somebody still
// holds them.
//
// A commit is held from its PREPARE on; it is *decided* once a COMMIT was sent. The newest one is always held, older
// ones as far as the budget goes. What the shard has already it answers again and does not apply, so that nobody needs
// to know which of them are saved. Of writes by key that the budget let go the sequences are kept, so that the shard
// can count those that are lost; of steps it knows which ones are missing.
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

  // Under its header's sequence, in place of what was held under it.
  void add(BufferedCommit commit);
  void decide(std::uint64_t sequence);
  // It was aborted.
  void drop(std::uint64_t sequence);
  void clear();
  // The first one of this or a later sequence; null when there is none.
  [[nodiscard]] const BufferedCommit* from(std::uint64_t sequence) const;
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

  // Sequences of writes by key that the budget let go, oldest first, the newest kMaxEvicted. They stay when a shard was
  // told: its process may end before anybody else knows, and the next one counts them from its own checkpoint.
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

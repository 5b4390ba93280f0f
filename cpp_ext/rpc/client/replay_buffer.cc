#include "rpc/client/replay_buffer.h"

#include <utility>

#include "commit/job_window.h"

namespace sparserow::rpc {
namespace {

// A shard refuses what it has forgotten, so that more of them would be of no use.
constexpr std::size_t kMostCommits = JobWindow::kSequences / 2;

}  // namespace

BufferedCommit::BufferedCommit(const FrameHeader& frame, const std::vector<iovec>& pieces) : header(frame) {
  body.reserve(frame.body_bytes);
  for (const iovec& piece : pieces) {
    const auto* bytes = static_cast<const std::byte*>(piece.iov_base);
    body.insert(body.end(), bytes, bytes + piece.iov_len);
  }
}

void ReplayBuffer::erase(Commits::iterator commit) {
  bytes_ -= commit->second.body.size();
  commits_.erase(commit);
}

void ReplayBuffer::add(BufferedCommit commit) {
  drop(commit.header.sequence);
  bytes_ += commit.body.size();
  commits_.emplace(commit.header.sequence, std::move(commit));
  while (commits_.size() > 1 && (bytes_ > budget_bytes_ || commits_.size() > kMostCommits)) {
    const FrameHeader& oldest = commits_.begin()->second.header;
    if (oldest.step == kNoStep) {
      evicted_.header = oldest;
      evicted_.sequences.push_back(oldest.sequence);
      if (evicted_.sequences.size() > kMaxEvicted) evicted_.sequences.pop_front();
    }
    erase(commits_.begin());
  }
}

void ReplayBuffer::decide(std::uint64_t sequence) {
  if (const auto found = commits_.find(sequence); found != commits_.end()) found->second.decided = true;
}

void ReplayBuffer::drop(std::uint64_t sequence) {
  if (const auto found = commits_.find(sequence); found != commits_.end()) erase(found);
}

void ReplayBuffer::clear() {
  commits_.clear();
  bytes_ = 0;
  evicted_.sequences.clear();
}

const BufferedCommit* ReplayBuffer::from(std::uint64_t sequence) const {
  const auto found = commits_.lower_bound(sequence);
  return found == commits_.end() ? nullptr : &found->second;
}

}  // namespace sparserow::rpc

#include "rpc/client/replay_buffer.h"

#include <utility>

#include "commit/job_window.h"

namespace sparserow::rpc {
namespace {

// A shard refuses what it has forgotten, so that more of them would be of no use.
constexpr std::size_t kMostHeld = JobWindow::kSequences / 2;

}  // namespace

HeldCommit::HeldCommit(const FrameHeader& frame, const std::vector<iovec>& pieces) : header(frame) {
  body.reserve(frame.body_bytes);
  for (const iovec& piece : pieces) {
    const auto* bytes = static_cast<const std::byte*>(piece.iov_base);
    body.insert(body.end(), bytes, bytes + piece.iov_len);
  }
}

void HeldCommits::erase(Commits::iterator commit) {
  bytes_ -= commit->second.body.size();
  commits_.erase(commit);
}

void HeldCommits::add(HeldCommit commit) {
  drop(commit.header.sequence);
  bytes_ += commit.body.size();
  commits_.emplace(commit.header.sequence, std::move(commit));
  while (commits_.size() > 1 && (bytes_ > budget_bytes_ || commits_.size() > kMostHeld)) {
    const FrameHeader& oldest = commits_.begin()->second.header;
    if (oldest.step == kNoStep) {
      let_go_.header = oldest;
      let_go_.sequences.push_back(oldest.sequence);
      if (let_go_.sequences.size() > kMostLetGo) let_go_.sequences.pop_front();
    }
    erase(commits_.begin());
  }
}

void HeldCommits::decide(std::uint64_t sequence) {
  if (const auto found = commits_.find(sequence); found != commits_.end()) found->second.decided = true;
}

void HeldCommits::drop(std::uint64_t sequence) {
  if (const auto found = commits_.find(sequence); found != commits_.end()) erase(found);
}

void HeldCommits::clear() {
  commits_.clear();
  bytes_ = 0;
  let_go_.sequences.clear();
}

const HeldCommit* HeldCommits::from(std::uint64_t sequence) const {
  const auto found = commits_.lower_bound(sequence);
  return found == commits_.end() ? nullptr : &found->second;
}

}  // namespace sparserow::rpc

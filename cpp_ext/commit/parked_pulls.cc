#include "commit/parked_pulls.h"

namespace sparserow {

void ParkedPulls::add(ParkedPull pull) {
  const std::uint64_t number = next_++;
  by_step_.emplace(pull.step, number);
  by_deadline_.emplace(pull.deadline, number);
  pulls_.emplace(number, std::move(pull));
}

std::vector<ParkedPull> ParkedPulls::take_readable(const std::function<bool(std::int64_t)>& is_readable) {
  std::vector<ParkedPull> taken;
  while (!by_step_.empty() && is_readable(by_step_.begin()->first)) taken.push_back(take(by_step_.begin()->second));
  return taken;
}

std::vector<ParkedPull> ParkedPulls::take_expired(std::chrono::steady_clock::time_point now) {
  std::vector<ParkedPull> taken;
  while (!by_deadline_.empty() && by_deadline_.begin()->first <= now) {
    taken.push_back(take(by_deadline_.begin()->second));
  }
  return taken;
}

std::vector<ParkedPull> ParkedPulls::take_if(const std::function<bool(const ParkedPull&)>& leaves) {
  std::vector<std::uint64_t> numbers;
  for (const auto& [number, pull] : pulls_) {
    if (leaves(pull)) numbers.push_back(number);
  }
  std::vector<ParkedPull> taken;
  for (const std::uint64_t number : numbers) taken.push_back(take(number));
  return taken;
}

ParkedPull ParkedPulls::take(std::uint64_t number) {
  const auto found = pulls_.find(number);
  by_step_.erase({found->second.step, number});
  by_deadline_.erase({found->second.deadline, number});
  ParkedPull pull = std::move(found->second);
  pulls_.erase(found);
  return pull;
}

}  // namespace sparserow

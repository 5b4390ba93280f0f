#include "rpc/server/hints.h"

#include <algorithm>
#include <exception>
#include <vector>

namespace sparserow::rpc {

std::uint64_t HintQueue::take(std::uint32_t table_id, std::span<const std::uint64_t> keys) {
  if (!store_.waits_for_disk()) {
    declined_ += keys.size();
    return 0;
  }
  std::uint64_t done = 0;
  for (; done < keys.size(); done += std::min(kSlice, keys.size() - done)) {
    const auto slice = keys.subspan(done, std::min(kSlice, keys.size() - done));
    if (waiting_.fetch_add(slice.size()) + slice.size() > kMostKeys) {
      waiting_ -= slice.size();
      break;
    }
    asio::post(strand_, [this, table_id, kept = std::vector<std::uint64_t>(slice.begin(), slice.end())] {
      // A pull of the rows reports the error. An exception would end the process, because this is no coroutine.
      try {
        if (!stopped_) static_cast<void>(store_.fetch_to_memory(table_id, kept));
      } catch (const std::exception&) {
      }
      waiting_ -= kept.size();
    });
  }
  taken_ += done;
  dropped_ += keys.size() - done;
  return done;
}

}  // namespace sparserow::rpc

// Forgets the entries of a map whose tables, say, have gone: not one by one, but when there are many.
//
// So the map has at most twice the entries of what is there, or kFew, and each entry that comes is looked at a constant
// number of times. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>

namespace sparserow {

class GoneEntries {
 public:
  static constexpr std::size_t kFew = 1024;

  // Before an entry is added. is_gone(entry).
  template <class Map, class IsGone>
  void forget(Map& entries, IsGone&& is_gone) {
    if (entries.size() < look_at_) return;
    std::erase_if(entries, is_gone);
    look_at_ = std::max(kFew, 2 * entries.size());
  }

 private:
  std::size_t look_at_ = kFew;
};

}  // namespace sparserow

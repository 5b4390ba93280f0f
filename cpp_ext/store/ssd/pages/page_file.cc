#include "store/ssd/pages/page_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {
namespace {

off_t offset_of(std::uint32_t segment, std::size_t at) noexcept {
  return static_cast<off_t>(std::uint64_t{segment} * kSegmentBytes + at);
}

}  // namespace

Result<std::unique_ptr<PageFile>> PageFile::make(const std::string& path, bool with_uring) {
  const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0644);
  if (file < 0) return Status(Code::kInvalidArgument, path + " cannot be made: " + std::strerror(errno));
  ::posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);                    // a record is read alone
  return std::unique_ptr<PageFile>(new PageFile(file, with_uring));  // NOLINT: the constructor is private
}

PageFile::~PageFile() { ::close(file_); }

Status PageFile::reserve(std::uint32_t segment) {
  for (;;) {
    if (::fallocate(file_, 0, offset_of(segment, 0), kSegmentBytes) == 0 || errno == EOPNOTSUPP) return Status::ok();
    if (errno != EINTR) return {Code::kResourceExhausted, std::strerror(errno)};
  }
}

Status PageFile::write(std::uint32_t segment, std::span<const std::byte> bytes) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t wrote = ::pwrite(file_, bytes.data() + done, bytes.size() - done, offset_of(segment, done));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return {Code::kResourceExhausted, wrote < 0 ? std::strerror(errno) : "nothing was written"};
    done += static_cast<std::size_t>(wrote);
  }
  return Status::ok();
}

PageFile::Got PageFile::read(std::uint32_t segment, std::size_t at, std::span<std::byte> out,
                             Wait wait) const noexcept {
  std::size_t done = 0;
  bool may_wait = wait == Wait::kYes;
  while (done < out.size()) {
    const iovec part{out.data() + done, out.size() - done};
    const ssize_t got = ::preadv2(file_, &part, 1, offset_of(segment, at + done), may_wait ? 0 : RWF_NOWAIT);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got < 0 && errno == EAGAIN && !may_wait) {
      return Got::kWouldWait;
    } else if (got < 0 && errno == EOPNOTSUPP && !may_wait) {
      may_wait = true;  // a file system that cannot tell
    } else if (got == 0) {
      errno = 0;
      return Got::kNotAll;
    } else if (errno != EINTR) {
      return Got::kNotAll;
    }
  }
  return Got::kAll;
}

void PageFile::read_late(std::span<const Part> parts, SsdReaders& readers,
                         const std::function<void(std::size_t, int)>& failed) {
  constexpr std::size_t kPartsAtOnce = 2;  // of one thread
  std::vector<FileRead> reads;
  reads.reserve(parts.size());
  for (const Part& part : parts) {
    reads.push_back({.offset = static_cast<std::uint64_t>(offset_of(part.segment, part.at)), .to = part.to});
  }
  if (uring_ == nullptr || !uring_->run(file_, reads)) {
    const std::size_t turns = (parts.size() + kPartsAtOnce - 1) / kPartsAtOnce;
    readers.run(turns, turns, [&](std::size_t turn) {
      for (std::size_t i = turn * kPartsAtOnce; i < std::min(parts.size(), (turn + 1) * kPartsAtOnce); ++i) {
        const Got got = read(parts[i].segment, parts[i].at, parts[i].to, Wait::kYes);
        reads[i].result = got == Got::kAll ? static_cast<int>(parts[i].to.size()) : -errno;
      }
    });
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (reads[i].result == static_cast<int>(parts[i].to.size())) continue;
    const bool is_tried_again = reads[i].result >= 0 || reads[i].result == -EINTR || reads[i].result == -EAGAIN ||
                                reads[i].result == -EINVAL;  // a kernel without this operation
    if (is_tried_again && read(parts[i].segment, parts[i].at, parts[i].to, Wait::kYes) == Got::kAll) continue;
    failed(i, is_tried_again ? errno : -reads[i].result);
  }
}

void PageFile::release(std::uint32_t segment) noexcept {
  static_cast<void>(
      ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(segment, 0), kSegmentBytes));
}

}  // namespace sparserow

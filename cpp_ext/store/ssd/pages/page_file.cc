#include "store/ssd/pages/page_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "store/ssd/pages/page_format.h"

namespace sparserow {
namespace {

off_t offset_of(std::uint32_t segment, std::size_t at) noexcept {
  return static_cast<off_t>(std::uint64_t{segment} * kSegmentBytes + at);
}

}  // namespace

Result<std::unique_ptr<PageFile>> PageFile::make(const std::string& path) {
  const int file = ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC, 0644);
  if (file < 0) return Status(Code::kInvalidArgument, path + " cannot be made: " + std::strerror(errno));
  ::posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);        // a record is read alone
  return std::unique_ptr<PageFile>(new PageFile(file));  // NOLINT: the constructor is private
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

void PageFile::release(std::uint32_t segment) noexcept {
  static_cast<void>(
      ::fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset_of(segment, 0), kSegmentBytes));
}

}  // namespace sparserow

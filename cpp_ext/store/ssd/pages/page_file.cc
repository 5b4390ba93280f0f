#include "store/ssd/pages/page_file.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "store/ssd/pages/page_format.h"

namespace sparserow {
namespace {

constexpr std::size_t kBytesAtOnce = std::size_t{1} << 20;  // of aligned memory that one turn of direct reads takes

struct FreeMemory {
  void operator()(std::byte* bytes) const noexcept { std::free(bytes); }
};
using AlignedBytes = std::unique_ptr<std::byte[], FreeMemory>;

// Null without memory.
AlignedBytes aligned_bytes(std::size_t units) noexcept {
  return AlignedBytes(static_cast<std::byte*>(std::aligned_alloc(kUnitBytes, units * kUnitBytes)));
}

bool is_aligned(std::size_t at, std::span<const std::byte> bytes) noexcept {
  return (at | bytes.size() | reinterpret_cast<std::uintptr_t>(bytes.data())) % kUnitBytes == 0;
}

// Whole units of a segment.
struct Units {
  std::uint32_t segment = 0;
  std::size_t first = 0;
  std::size_t end = 0;
};

Units units_of(const PageFile::Part& part) noexcept {
  return {part.segment, part.at / kUnitBytes, (part.at + part.to.size() + kUnitBytes - 1) / kUnitBytes};
}

off_t offset_of(std::uint32_t segment, std::size_t at) noexcept {
  return static_cast<off_t>(std::uint64_t{segment} * kSegmentBytes + at);
}

}  // namespace

Result<std::unique_ptr<PageFile>> PageFile::make(const std::string& path, Access access) {
  const int file =
      ::open(path.c_str(), O_CREAT | O_TRUNC | O_RDWR | O_CLOEXEC | (access.is_direct ? O_DIRECT : 0), 0600);
  if (file < 0 && errno == EINVAL && access.is_direct) {
    return Status(Code::kFailedPrecondition,
                  "true is not allowed, since the file system of " + path + " has no direct I/O; allowed: false");
  }
  if (file < 0) return Status(Code::kInvalidArgument, path + " cannot be made: " + std::strerror(errno));
  ::posix_fadvise(file, 0, 0, POSIX_FADV_RANDOM);                // a record is read alone
  return std::unique_ptr<PageFile>(new PageFile(file, access));  // NOLINT: the constructor is private
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
  const bool may_wait = wait == Wait::kYes;
  if (!is_direct_) return read_bytes(segment, at, out, may_wait);
  if (!may_wait) return Got::kWouldWait;
  return is_aligned(at, out) ? read_bytes(segment, at, out, true) : read_units(segment, at, out);
}

// The bytes by way of aligned memory.
PageFile::Got PageFile::read_units(std::uint32_t segment, std::size_t at, std::span<std::byte> out) const noexcept {
  const Units units = units_of({segment, at, out});
  const AlignedBytes memory = aligned_bytes(units.end - units.first);
  if (memory == nullptr) {
    errno = ENOMEM;
    return Got::kNotAll;
  }
  const std::span whole(memory.get(), (units.end - units.first) * kUnitBytes);
  const Got got = read_bytes(segment, units.first * kUnitBytes, whole, true);
  if (got == Got::kAll) std::memcpy(out.data(), whole.data() + (at - units.first * kUnitBytes), out.size());
  return got;
}

PageFile::Got PageFile::read_bytes(std::uint32_t segment, std::size_t at, std::span<std::byte> out,
                                   bool may_wait) const noexcept {
  std::size_t done = 0;
  while (done < out.size()) {
    const iovec part{out.data() + done, out.size() - done};
    const ssize_t got = ::preadv2(file_, &part, 1, offset_of(segment, at + done), may_wait ? 0 : RWF_NOWAIT);
    if (got > 0) {
      done += static_cast<std::size_t>(got);
    } else if (got < 0 && errno == EAGAIN && !may_wait) {
      return Got::kWouldWait;
    } else if (got < 0 && errno == EOPNOTSUPP && !may_wait) {
      may_wait = true;  // a file system without RWF_NOWAIT
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
  is_direct_ ? read_parts_by_units(parts, readers, failed) : read_parts(parts, readers, failed);
}

// Turns of aligned memory that is bounded. Parts that follow each other in the file are one read.
void PageFile::read_parts_by_units(std::span<const Part> parts, SsdReaders& readers, const Failed& failed) {
  for (std::size_t begin = 0, end = 0; begin < parts.size(); begin = end) {
    std::vector<Units> runs;
    std::vector<std::size_t> run_of;  // of each part of the turn
    std::size_t taken = 0;            // units
    for (; end < parts.size(); ++end) {
      const Units units = units_of(parts[end]);
      Units* const last = runs.empty() ? nullptr : &runs.back();
      const bool joins =
          last != nullptr && last->segment == units.segment && units.first >= last->first && units.first <= last->end;
      const std::size_t more = joins ? std::max(units.end, last->end) - last->end : units.end - units.first;
      if (taken > 0 && (taken + more) * kUnitBytes > kBytesAtOnce) break;
      joins ? static_cast<void>(last->end += more) : runs.push_back(units);
      run_of.push_back(runs.size() - 1);
      taken += more;
    }
    const AlignedBytes memory = aligned_bytes(taken);
    std::vector<std::optional<int>> errors(runs.size());
    std::vector<Part> whole;
    std::byte* to = memory.get();
    for (const Units& run : runs) {
      const std::size_t bytes = (run.end - run.first) * kUnitBytes;
      whole.push_back({run.segment, run.first * kUnitBytes, std::span(to, memory == nullptr ? 0 : bytes)});
      if (memory != nullptr) to += bytes;
    }
    if (memory == nullptr) {
      errors.assign(runs.size(), ENOMEM);
    } else {
      read_parts(whole, readers, [&errors](std::size_t run, int error) { errors[run] = error; });
    }
    for (std::size_t i = begin; i < end; ++i) {
      const std::size_t run = run_of[i - begin];
      if (errors[run]) {
        failed(i, *errors[run]);
      } else {
        std::memcpy(parts[i].to.data(), whole[run].to.data() + (parts[i].at - whole[run].at), parts[i].to.size());
      }
    }
  }
}

void PageFile::read_parts(std::span<const Part> parts, SsdReaders& readers, const Failed& failed) {
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

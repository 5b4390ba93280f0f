#include "util/file_reader.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "util/file_descriptor.h"
#include "util/hash.h"
#include "util/mutex.h"

namespace sparserow {
namespace {

constexpr std::size_t kBlockBytes = std::size_t{1} << 20;  // fits in a core's second cache
constexpr std::size_t kReadBytes = std::size_t{4} << 20;   // of one read around the cache: the disk gets all at once
constexpr std::size_t kPageBytes = 4096;                   // that and offsets of reads around the cache are multiples
constexpr std::size_t kHugeBytes = std::size_t{2} << 20;

Status error_of(const std::string& path, int error) {
  const Code code = error == ENOENT || error == ENOTDIR ? Code::kNotFound
                    : error == ENOMEM                   ? Code::kResourceExhausted
                                                        : Code::kFailedPrecondition;
  return {code, path + ": " + std::strerror(error)};
}

FileDescriptor opened(const std::string& path, int flags) {
  return FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | flags));
}

// Whether the system's cache has at least half of a file.
bool is_cached(int file, std::uint64_t size) {
  void* const mapped = ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  if (mapped == MAP_FAILED) return true;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));  // of 4, 16 or 64 KiB on aarch64
  std::vector<unsigned char> pages((size + page - 1) / page);
  const bool is_known = ::mincore(mapped, size, pages.data()) == 0;
  ::munmap(mapped, size);
  const auto there = std::count_if(pages.begin(), pages.end(), [](unsigned char each) { return (each & 1) != 0; });
  return !is_known || static_cast<std::size_t>(there) * 2 >= pages.size();
}

// The bytes read at `at`, fewer than `bytes` at the end of the file; negative: minus the error.
ssize_t read_some(int file, std::byte* to, std::size_t bytes, std::uint64_t at) {
  while (true) {
    const ssize_t got = ::pread(file, to, bytes, static_cast<off_t>(at));
    if (got >= 0) return got;
    if (errno != EINTR) return -errno;
  }
}

// Reads a file of `size` bytes, and hashes what was read before it reads on. Returns the bytes read: fewer than `size`
// when it has been cut short meanwhile.
Result<std::uint64_t> read_blocks(const std::string& path, int cached, std::byte* to, std::uint64_t size,
                                  XXH3_state_t& hash) {
  // A file system without reads around its cache refuses to open the file so, or the first read.
  const FileDescriptor direct = opened(path, O_DIRECT);
  bool is_direct = direct.is_open() && !is_cached(cached, size);
  std::uint64_t done = 0;
  while (done < size) {
    const std::size_t left = size - done;
    const std::size_t pages = (left + kPageBytes - 1) / kPageBytes * kPageBytes;
    const ssize_t got = is_direct ? read_some(direct.get(), to + done, std::min(kReadBytes, pages), done)
                                  : read_some(cached, to + done, std::min(kBlockBytes, left), done);
    if (got == -EINVAL && is_direct) {
      is_direct = false;
      continue;
    }
    if (got < 0) return error_of(path, static_cast<int>(-got));
    if (got == 0) break;
    const std::size_t fresh = std::min<std::size_t>(left, static_cast<std::size_t>(got));
    for (std::size_t at = 0; at < fresh; at += kBlockBytes) {
      XXH3_64bits_update(&hash, to + done + at, std::min(kBlockBytes, fresh - at));
    }
    done += fresh;
    is_direct = is_direct && done % kPageBytes == 0;
  }
  return done;
}

}  // namespace

class FileReader::Memory {
 public:
  explicit Memory(std::size_t bytes) : capacity_((bytes + kHugeBytes - 1) / kHugeBytes * kHugeBytes) {
    void* const mapped = ::mmap(nullptr, capacity_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return;
    at_ = static_cast<std::byte*>(mapped);
    ::madvise(at_, capacity_, MADV_HUGEPAGE);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() {
    if (at_ != nullptr) ::munmap(at_, capacity_);
  }
  [[nodiscard]] std::byte* at() const noexcept { return at_; }
  [[nodiscard]] std::size_t capacity() const noexcept { return capacity_; }

 private:
  std::byte* at_ = nullptr;
  std::size_t capacity_;
};

struct FileReader::Spare {
  static constexpr std::size_t kMost = 4;
  Mutex mutex;
  std::vector<std::unique_ptr<Memory>> free SR_GUARDED_BY(mutex);
};

FileReader::FileReader() : spare_(std::make_shared<Spare>()) {}

// Memory for a file, which goes back to `spare_` even after its reader has gone. Null when the system refuses it.
std::shared_ptr<FileReader::Memory> FileReader::take(std::size_t bytes) {
  std::unique_ptr<Memory> memory;
  {
    const MutexLock lock(spare_->mutex);
    if (!spare_->free.empty()) {
      memory = std::move(spare_->free.back());
      spare_->free.pop_back();
    }
  }
  if (memory == nullptr || memory->capacity() < bytes) memory = std::make_unique<Memory>(bytes);
  if (memory->at() == nullptr) return nullptr;
  return {memory.release(), [spare = spare_](Memory* used) {
            std::unique_ptr<Memory> owned(used);
            const MutexLock lock(spare->mutex);
            if (spare->free.size() < Spare::kMost) spare->free.push_back(std::move(owned));
          }};
}

Result<FileReader::File> FileReader::read(const std::string& path, std::uint64_t size) {
  const FileDescriptor cached = opened(path, 0);
  if (!cached.is_open()) return error_of(path, errno);
  struct stat facts{};
  if (::fstat(cached.get(), &facts) != 0) return error_of(path, errno);
  File file;
  file.size = static_cast<std::uint64_t>(facts.st_size);
  if (!S_ISREG(facts.st_mode)) return error_of(path, EISDIR);
  if (file.size != size || size == 0) {
    file.xxh3 = XXH3_64bits(nullptr, 0);
    return file;
  }
  file.memory = take((size + kPageBytes - 1) / kPageBytes * kPageBytes);
  if (file.memory == nullptr) return error_of(path, ENOMEM);
  XXH3_state_t hash;
  XXH3_64bits_reset(&hash);
  const Result<std::uint64_t> done = read_blocks(path, cached.get(), file.memory->at(), size, hash);
  if (!done.is_ok()) return done.status();
  if (::fstat(cached.get(), &facts) != 0) return error_of(path, errno);
  file.bytes = {file.memory->at(), done.value()};
  file.size = done.value() < size ? done.value() : static_cast<std::uint64_t>(facts.st_size);
  file.xxh3 = XXH3_64bits_digest(&hash);
  return file;
}

}  // namespace sparserow

#include "rpc/transport/lane.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "util/not_allowed.h"

namespace sparserow::rpc {
namespace {

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW;

Status unavailable(const char* what) {
  return {Code::kUnavailable, std::string("lane: ") + what + ": " + std::strerror(errno)};
}

Result<std::span<std::byte>> mapped(int descriptor, std::uint64_t bytes) {
  void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (at == MAP_FAILED) return unavailable("mmap");
  ::madvise(at, bytes, MADV_DONTFORK);
  return std::span(static_cast<std::byte*>(at), bytes);
}

}  // namespace

std::string LaneRegion::allowed() {
  return "a multiple of " + std::to_string(kUnit) + " of at most " + std::to_string(kMostBytes);
}

LaneRegion::LaneRegion(FileDescriptor descriptor, std::span<std::byte> bytes)
    : descriptor_(std::move(descriptor)), bytes_(bytes), pid_(::getpid()) {}

LaneRegion::~LaneRegion() {
  // In a child of fork other memory may lie there.
  if (::getpid() == pid_) ::munmap(bytes_.data(), bytes_.size());
}

Result<std::unique_ptr<LaneRegion>> LaneRegion::make(std::uint64_t bytes) {
  FileDescriptor descriptor(::memfd_create("sparserow-lane", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!descriptor.is_open()) return unavailable("memfd_create");
  if (::ftruncate(descriptor.get(), static_cast<off_t>(bytes)) != 0) return unavailable("ftruncate");
  if (::fcntl(descriptor.get(), F_ADD_SEALS, kSeals | F_SEAL_SEAL) != 0) return unavailable("F_ADD_SEALS");
  const auto at = mapped(descriptor.get(), bytes);
  if (!at.is_ok()) return at.status();
  return std::unique_ptr<LaneRegion>(new LaneRegion(std::move(descriptor), at.value()));
}

Result<std::unique_ptr<LaneRegion>> LaneRegion::map(FileDescriptor descriptor, std::uint64_t bytes) {
  if (bytes == 0 || bytes > kMostBytes || bytes % kUnit != 0) {
    return not_allowed("lane.bytes", bytes, allowed());
  }
  struct stat facts{};
  struct statfs system{};
  const int seals = descriptor.is_open() ? ::fcntl(descriptor.get(), F_GET_SEALS) : -1;
  if (seals < 0 || ::fstat(descriptor.get(), &facts) != 0 || ::fstatfs(descriptor.get(), &system) != 0 ||
      system.f_type == HUGETLBFS_MAGIC) {
    return must_be("lane.descriptor", "one of memfd_create, with pages of 4096 bytes");
  }
  if ((seals & kSeals) != kSeals) return must_be("lane.descriptor", "one that is sealed against another size");
  if (facts.st_size < 0 || static_cast<std::uint64_t>(facts.st_size) != bytes) {
    return not_allowed("lane.bytes", bytes, "the size of the memory, " + std::to_string(facts.st_size));
  }
  const auto at = mapped(descriptor.get(), bytes);
  if (!at.is_ok()) return at.status();
  return std::unique_ptr<LaneRegion>(new LaneRegion(FileDescriptor(), at.value()));
}

LanePlaces::LanePlaces(std::span<std::byte> region) : region_(region) {
  if (!region.empty()) free_[0] = region.size();
}

std::optional<LanePlaces::Place> LanePlaces::take(std::uint64_t bytes) {
  const std::uint64_t wanted = (std::max<std::uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  const auto room =
      std::find_if(free_.begin(), free_.end(), [wanted](const auto& run) { return run.second >= wanted; });
  if (wanted < bytes || room == free_.end()) return std::nullopt;
  const auto [offset, size] = *room;
  free_.erase(room);
  if (size > wanted) free_[offset + wanted] = size - wanted;
  for (; touched_ < offset + wanted; touched_ += LaneRegion::kUnit) {
    *static_cast<volatile std::byte*>(region_.data() + touched_) = std::byte{0};
  }
  return Place{offset, wanted};
}

std::uint64_t LanePlaces::taken() const noexcept {
  std::uint64_t taken = region_.size();
  for (const auto& [offset, bytes] : free_) taken -= bytes;
  return taken;
}

void LanePlaces::give_back(const Place& place) {
  auto at = free_.emplace(place.offset, place.bytes).first;
  if (const auto after = std::next(at); after != free_.end() && at->first + at->second == after->first) {
    at->second += after->second;
    free_.erase(after);
  }
  if (at == free_.begin()) return;
  if (const auto before = std::prev(at); before->first + before->second == at->first) {
    before->second += at->second;
    free_.erase(at);
  }
}

Result<std::shared_ptr<LaneArena>> LaneArena::make(std::uint64_t bytes) {
  auto region = LaneRegion::make(bytes);
  if (!region.is_ok()) return region.status();
  return std::shared_ptr<LaneArena>(new LaneArena(std::move(region).value()));
}

std::shared_ptr<std::byte[]> LaneArena::take(std::uint64_t bytes) {
  const auto place = [&] {
    const MutexLock lock(mutex_);
    return places_.take(bytes);
  }();
  if (!place) return nullptr;
  return {region_->bytes().data() + place->offset, [self = shared_from_this(), at = *place](std::byte*) {
            const MutexLock lock(self->mutex_);
            self->places_.give_back(at);
          }};
}

std::optional<std::uint64_t> LaneArena::offset_of(const void* first, std::uint64_t bytes) const noexcept {
  const auto all = region_->bytes();
  const auto begin = reinterpret_cast<std::uintptr_t>(first), from = reinterpret_cast<std::uintptr_t>(all.data());
  if (begin < from || begin - from > all.size() || bytes > all.size() - (begin - from)) return std::nullopt;
  return begin - from;
}

}  // namespace sparserow::rpc

#include "store/ssd/ssd_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <system_error>

#include "util/hash.h"

namespace sparserow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "SPARSEROW";
constexpr const char* kFreshManifest = "SPARSEROW.new";
constexpr const char* kLock = "LOCK";
constexpr const char* kRows = "rows";

Status refused(const std::string& path, const std::string& what) {
  return {Code::kInvalidArgument, "ssd_path: " + path + " " + what};
}

constexpr SsdEngine kEngines[] = {SsdEngine::kPages, SsdEngine::kRocksdb};

constexpr std::uint32_t format_of(SsdEngine engine) noexcept { return engine == SsdEngine::kRocksdb ? 1 : 2; }

std::string manifest_of(const SsdOptions& options, SsdEngine engine) {
  std::ostringstream text;
  text << "format " << format_of(engine) << "\nhash " << kHashVersion << "\ncluster " << options.cluster_id
       << "\nshard " << options.shard << "\n";
  return text.str();
}

// Whole or not at all, so that a folder is never taken for another's.
Status write_manifest(const fs::path& path, const std::string& manifest) {
  const fs::path fresh = path / kFreshManifest;
  {
    std::ofstream file(fresh);
    file << manifest << std::flush;
    if (!file) return refused(path.string(), "cannot be written: is the disk full?");
  }
  std::error_code error;
  fs::rename(fresh, path / kManifest, error);
  return error ? refused(path.string(), "cannot be written: " + error.message()) : Status::ok();
}

// Names the first line that differs.
Status same_manifest(const std::string& path, const std::string& found, const std::string& wanted) {
  std::istringstream left(found);
  std::istringstream right(wanted);
  std::string is;
  std::string should;
  while (std::getline(right, should)) {
    if (!std::getline(left, is)) is = "nothing";
    if (is != should) {
      return refused(path, "holds the rows of another shard or version (its file SPARSEROW says '" + is +
                               "', this shard is '" + should +
                               "'); name another folder, or remove it if its rows "
                               "are not needed");
    }
  }
  return Status::ok();
}

Result<std::string> read_manifest(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  if (!file) return Status(Code::kInvalidArgument, "ssd_path: " + path.string() + " cannot be read");
  return text.str();
}

}  // namespace

Result<std::unique_ptr<SsdFolder>> SsdFolder::claim(const SsdOptions& options) {
  const fs::path path(options.path);
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return refused(options.path, "is no folder; make it, on the disk that shall hold the rows");
  }
  const int lock = ::open((path / kLock).c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0600);
  if (lock < 0) return refused(options.path, std::string("cannot be written: ") + std::strerror(errno));
  std::unique_ptr<SsdFolder> folder(new SsdFolder(lock, (path / kRows).string()));
  if (::flock(lock, LOCK_EX | LOCK_NB) != 0) {
    return Status(Code::kFailedPrecondition,
                  "ssd_path: " + options.path + " is in use by another process; stop it, or name another folder");
  }
  const std::string manifest = manifest_of(options, options.engine);
  if (fs::exists(path / kManifest, error)) {
    const auto found = read_manifest(path / kManifest);
    if (!found.is_ok()) return found.status();
    const bool is_other_engine = std::any_of(std::begin(kEngines), std::end(kEngines), [&](SsdEngine engine) {
      return engine != options.engine && found.value() == manifest_of(options, engine);
    });
    if (!is_other_engine) SR_RETURN_IF_ERROR(same_manifest(options.path, found.value(), manifest));
    fs::remove_all(path / kRows, error);
    if (error) return refused(options.path, "cannot be emptied: " + error.message());
    if (is_other_engine) SR_RETURN_IF_ERROR(write_manifest(path, manifest));
    return folder;
  }
  for (const auto& entry : fs::directory_iterator(path, error)) {
    const std::string name = entry.path().filename().string();
    if (name != kLock && name != kFreshManifest && name != "lost+found") {
      return refused(options.path, "holds " + name + ", which is not this shard's; name an empty folder");
    }
  }
  if (error) return refused(options.path, "cannot be listed: " + error.message());
  SR_RETURN_IF_ERROR(write_manifest(path, manifest));
  return folder;
}

SsdFolder::~SsdFolder() { ::close(lock_); }

}  // namespace sparserow

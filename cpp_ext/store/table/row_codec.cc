#include "store/table/row_codec.h"

#include <cstring>

#include "util/hash.h"

namespace sparserow {
namespace {

struct Header {
  std::uint32_t checksum = 0;
  std::uint8_t format = RowCodec::kFormat;
  std::uint8_t dtype = 0;
  std::uint16_t dim = 0;
  std::uint16_t state_floats = 0;
  std::uint16_t zero = 0;
  std::uint32_t update_count = 0;
  std::uint64_t version = 0;
};
static_assert(sizeof(Header) == RowCodec::kHeaderBytes);

std::uint32_t checksum_of(std::uint32_t table_id, std::uint64_t key, const std::byte* row, std::size_t bytes) noexcept {
  constexpr std::size_t kSkip = sizeof(Header::checksum);
  return static_cast<std::uint32_t>(XXH3_64bits_withSeed(row + kSkip, bytes - kSkip, row_hash(table_id, key)));
}

Status broken(std::uint64_t key, const std::string& what) {
  return {Code::kDataLoss, "the stored row of key " + std::to_string(key) + " " + what};
}

}  // namespace

void RowCodec::encode(std::uint64_t key, RowRef row, std::byte* out) const noexcept {
  Header header;
  header.dtype = static_cast<std::uint8_t>(dtype_);
  header.dim = static_cast<std::uint16_t>(dim_);
  header.state_floats = static_cast<std::uint16_t>(state_floats_);
  header.update_count = row.update_count();
  header.version = row.version();
  std::memcpy(out, &header, sizeof header);
  std::memcpy(out + sizeof header, row.weights(), layout_.data_bytes);
  header.checksum = checksum_of(table_id_, key, out, bytes());
  std::memcpy(out, &header.checksum, sizeof header.checksum);
}

Result<RowImage> RowCodec::decode(std::uint64_t key, std::span<const std::byte> stored) const {
  if (stored.size() != bytes()) {
    return broken(key, "has " + std::to_string(stored.size()) + " bytes, not " + std::to_string(bytes()));
  }
  Header header;
  std::memcpy(&header, stored.data(), sizeof header);
  if (header.checksum != checksum_of(table_id_, key, stored.data(), stored.size())) {
    return broken(key, "fails its checksum");
  }
  if (header.format != kFormat) {
    return broken(key, "has format " + std::to_string(header.format) + ", not " + std::to_string(kFormat));
  }
  if (header.dtype != static_cast<std::uint8_t>(dtype_) || header.dim != dim_ || header.state_floats != state_floats_) {
    return broken(key, "has the dtype, dim or state of another schema");
  }
  return RowImage{header.version, header.update_count, stored.data() + sizeof header};
}

}  // namespace sparserow

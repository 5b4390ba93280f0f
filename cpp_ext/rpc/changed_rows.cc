#include "rpc/changed_rows.h"

#include <algorithm>
#include <cstring>

namespace sparserow::rpc {
namespace {

constexpr std::size_t kKeysAtOnce = 1024;

// What a reply has of one table, row by row.
struct Changed {
  std::vector<std::uint32_t> positions;
  std::vector<std::byte> rows;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint8_t> found;
};

Status gather(const Store& store, const PullPart& part, Changed& out) {
  const std::size_t row_bytes = std::size_t{part.descriptor.dim} * size_of(part.descriptor.dtype);
  std::vector<std::byte> rows(std::min(kKeysAtOnce, part.keys.size()) * row_bytes);
  std::vector<std::uint64_t> versions(kKeysAtOnce);
  std::vector<std::uint8_t> found(kKeysAtOnce);
  for (std::size_t begin = 0; begin < part.keys.size(); begin += kKeysAtOnce) {
    const std::size_t n = std::min(kKeysAtOnce, part.keys.size() - begin);
    SR_RETURN_IF_ERROR(store.pull(part.descriptor.table_id, part.keys.subspan(begin, n), part.descriptor.dtype,
                                  rows.data(), {.versions = versions.data(), .found = found.data()}));
    for (std::size_t i = 0; i < n; ++i) {
      if (!part.known.empty() && part.known[begin + i] == versions[i]) continue;
      out.positions.push_back(static_cast<std::uint32_t>(begin + i));
      out.rows.insert(out.rows.end(), rows.data() + i * row_bytes, rows.data() + (i + 1) * row_bytes);
      out.versions.push_back(versions[i]);
      out.found.push_back(found[i]);
    }
  }
  return Status::ok();
}

template <class T>
void append(std::vector<std::byte>& body, const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  body.insert(body.end(), bytes.begin(), bytes.end());
  body.resize(padded8(body.size()));
}

template <class T>
void append_struct(std::vector<std::byte>& body, const T& value) {
  const auto bytes = bytes_of(value);
  body.insert(body.end(), bytes.begin(), bytes.end());
}

}  // namespace

Result<std::vector<std::byte>> changed_rows_body(const Store& store, std::span<const PullPart> parts) {
  std::vector<std::byte> body;
  for (const PullPart& part : parts) {
    Changed changed;
    SR_RETURN_IF_ERROR(gather(store, part, changed));
    PullPart reply = part;
    reply.descriptor.n = static_cast<std::uint32_t>(changed.positions.size());
    SectionHeader section;
    section.kind = static_cast<std::uint16_t>(SectionKind::kTableRows);
    section.flags = kSectionRequired;
    section.payload_bytes = reply_section_bytes(reply) - sizeof section;
    append_struct(body, section);
    append_struct(body, reply_descriptor(reply));
    if ((part.descriptor.flags & kTableKnown) != 0) append(body, changed.positions);
    append(body, changed.rows);
    if ((part.descriptor.flags & kTableVersions) != 0) append(body, changed.versions);
    if ((part.descriptor.flags & kTableFound) != 0) append(body, changed.found);
  }
  return body;
}

}  // namespace sparserow::rpc

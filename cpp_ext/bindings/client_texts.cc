// _client: the keys of many texts, as they lie in the buffers of an Arrow array.
#include "bindings/client_texts.h"

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "bindings/shared_arrays.h"
#include "util/hash.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

// The keys of n texts. `offsets` has n + 1 ascending places in `bytes`: text i is bytes[offsets[i], offsets[i + 1]).
py::array text_keys(const py::array& offsets, const py::buffer& bytes) {
  if (!py::isinstance<py::array_t<std::int64_t, py::array::c_style>>(offsets) || offsets.ndim() != 1 ||
      offsets.size() == 0) {
    raise_if_error(must_be("offsets", "a one-dimensional contiguous int64 array with at least one element"));
  }
  const py::buffer_info data = bytes.request();
  if (data.itemsize != 1 || data.ndim != 1) raise_if_error(must_be("bytes", "a one-dimensional buffer of bytes"));
  const std::span<const std::int64_t> at(static_cast<const std::int64_t*>(offsets.data()),
                                         static_cast<std::size_t>(offsets.size()));
  std::vector<std::int64_t> keys(at.size() - 1);
  bool is_ascending = at.front() >= 0 && at.back() <= data.size;
  {
    const py::gil_scoped_release release;
    for (std::size_t i = 0; i < keys.size(); ++i) is_ascending = is_ascending && at[i] <= at[i + 1];
    const char* begin = static_cast<const char*>(data.ptr);
    for (std::size_t i = 0; is_ascending && i < keys.size(); ++i) {
      keys[i] = static_cast<std::int64_t>(
          key_of_text(std::string_view(begin + at[i], static_cast<std::size_t>(at[i + 1] - at[i]))));
    }
  }
  if (!is_ascending) raise_if_error(must_be("offsets", "ascending places within the bytes"));
  const auto count = static_cast<py::ssize_t>(keys.size());
  return array_of(std::move(keys), {count});
}

}  // namespace

void bind_texts(py::module_& module) { module.def("text_keys", &text_keys, py::arg("offsets"), py::arg("bytes")); }

}  // namespace sparserow::bindings

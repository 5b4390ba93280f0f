#include "bindings/client_storage.h"

#include <pybind11/numpy.h>

#include <string>
#include <utility>

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

// A Python object that any thread may drop.
class OwnedObject {
 public:
  explicit OwnedObject(py::object object) : object_(std::move(object)) {}
  OwnedObject(const OwnedObject&) = delete;
  OwnedObject& operator=(const OwnedObject&) = delete;
  ~OwnedObject() {
    const py::gil_scoped_acquire gil;
    object_ = py::object();
  }
  [[nodiscard]] const py::object& object() const noexcept { return object_; }

 private:
  py::object object_;
};

// The array of a call: no copy, and writable, as torch wants it.
template <class T>
py::array view(const T* data, std::size_t rows) {
  return py::array_t<T>(static_cast<py::ssize_t>(rows), const_cast<T*>(data), py::none());
}

py::array view(const float* data, std::size_t rows, std::uint32_t dim) {
  return py::array_t<float>({static_cast<py::ssize_t>(rows), static_cast<py::ssize_t>(dim)}, const_cast<float*>(data),
                            py::none());
}

template <class Call>
Status called(Call&& call) {
  const py::gil_scoped_acquire gil;
  try {
    call();
    return Status::ok();
  } catch (const py::error_already_set& error) {
    const bool is_refused = error.matches(PyExc_ValueError);
    return {is_refused ? Code::kInvalidArgument : Code::kInternal, std::string("row cache: ") + error.what()};
  }
}

class PythonStorage final : public RowStorage {
 public:
  PythonStorage(py::object storage, std::uint32_t dim) : storage_(std::move(storage)), dim_(dim) {}

  Status probe(std::uint32_t table_id, std::span<const std::uint64_t> keys, std::int64_t oldest, Cached* found,
               std::uint64_t* versions, float* rows) override {
    return called([&] {
      storage_.object().attr("probe")(table_id, view(keys.data(), keys.size()), oldest,
                                      view(reinterpret_cast<std::uint8_t*>(found), keys.size()),
                                      view(versions, keys.size()), view(rows, keys.size(), dim_));
    });
  }
  Status put(std::uint32_t table_id, std::span<const std::uint64_t> keys, const std::uint64_t* versions,
             const float* rows, std::int64_t validated) override {
    return called([&] {
      storage_.object().attr("put")(table_id, view(keys.data(), keys.size()), view(versions, keys.size()),
                                    view(rows, keys.size(), dim_), validated);
    });
  }
  Status drop(std::uint32_t table_id, std::span<const std::uint64_t> keys) override {
    return called([&] { storage_.object().attr("drop")(table_id, view(keys.data(), keys.size())); });
  }

 private:
  OwnedObject storage_;
  std::uint32_t dim_;
};

}  // namespace

MakeStorage storage_of(py::object make) {
  auto factory = std::make_shared<OwnedObject>(std::move(make));
  return [factory](std::uint64_t bytes, std::uint32_t dim) -> Result<std::unique_ptr<RowStorage>> {
    std::unique_ptr<RowStorage> storage;
    const Status status =
        called([&] { storage = std::make_unique<PythonStorage>(factory->object()(bytes, dim), dim); });
    if (!status.is_ok()) return status;
    return storage;
  };
}

}  // namespace sparserow::bindings

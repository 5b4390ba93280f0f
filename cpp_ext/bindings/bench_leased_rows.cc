// Pulls and pushes as a step of training does them: rows lie in memory of the session, which is used again.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "client_keyed.h"
#include "shared_arrays.h"
#include "shared_errors.h"
#include "util/not_allowed.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::chrono::milliseconds kDeadline{60'000};

class LeasedRows {
 public:
  using Matrix = py::array_t<float, py::array::c_style>;

  LeasedRows(std::shared_ptr<KeyedClient> client, std::uint32_t table_id, const Matrix& rows)
      : client_(std::move(client)), table_id_(table_id), work_(*client_->shards()) {
    if (rows.ndim() != 2 || rows.size() == 0) raise_if_error(must_be("rows", "a float32 array of shape (n, dim)"));
    dim_ = static_cast<std::uint32_t>(rows.shape(1));
    const auto room = work_.make_room(*client_->shards(), static_cast<std::size_t>(rows.size()));
    std::copy_n(rows.data(), room.size(), room.data());
  }

  void pull(const py::array& keys) {
    const auto ids = wanted(keys);
    const py::gil_scoped_release released;
    find_duplicates(ids);
    TablePull pull{.table_id = table_id_,
                   .schema_version = 1,
                   .dim = dim_,
                   .keys = work_.partition.keys,
                   .shard_begin = work_.partition.shard_begin};
    pull.rows = work_.make_room(*client_->shards(), work_.partition.keys.size() * dim_);
    pull.memory = work_.rows;
    raise_if_error(client_->shards()->pull(std::span(&pull, 1), {.deadline = kDeadline, .step = kNoStep}));
  }

  void push(const py::array& keys, float lr, std::uint64_t sequence) {
    const auto ids = wanted(keys);
    const py::gil_scoped_release released;
    find_duplicates(ids);
    TablePush push{.table_id = table_id_,
                   .schema_version = 1,
                   .dim = dim_,
                   .lr = lr,
                   .keys = work_.partition.keys,
                   .shard_begin = work_.partition.shard_begin};
    push.grads = work_.make_room(*client_->shards(), work_.partition.keys.size() * dim_);
    push.memory = work_.rows;
    const CommitOptions options{.deadline = kDeadline, .sequence = sequence};
    raise_if_error(client_->shards()->commit(std::span(&push, 1), options));
  }

 private:
  std::span<const std::uint64_t> wanted(const py::array& keys) const {
    const auto ids = keys_of(keys);
    if (ids.empty() || ids.size() * dim_ > work_.rows->size()) {
      raise_if_error(not_allowed("keys", ids.size(), range_text(1, work_.rows->size() / dim_)));
    }
    return ids;
  }
  void find_duplicates(std::span<const std::uint64_t> ids) {
    work_.partitioner.partition(table_id_, ids, work_.partition);
  }

  const std::shared_ptr<KeyedClient> client_;
  const std::uint32_t table_id_;
  std::uint32_t dim_ = 0;
  Workspace work_;
};

}  // namespace

void bind_leased_rows(py::module_& module) {
  py::class_<LeasedRows>(module, "LeasedRows")
      .def(py::init<std::shared_ptr<KeyedClient>, std::uint32_t, const LeasedRows::Matrix&>(), py::arg("client"),
           py::arg("table_id"), py::arg("rows"))
      .def("pull", &LeasedRows::pull, py::arg("keys"))
      .def("push", &LeasedRows::push, py::arg("keys"), py::kw_only(), py::arg("lr"), py::arg("sequence"));
}

}  // namespace sparserow::bindings

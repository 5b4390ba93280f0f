// _client: shards inside this process (shards/local_shards.h) for tests and for training without a server.
#include "bindings/client_local.h"

#include <pybind11/stl.h>

#include "bindings/client_schema.h"
#include "bindings/shared_errors.h"
#include "shards/local_shards.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;

// LocalShards with the stores it owns, so that tables can be made on all of them.
class LocalCluster {
 public:
  LocalCluster(std::uint32_t shards, std::uint32_t slot_count, std::uint64_t memory_budget_bytes) {
    for (std::uint32_t s = 0; s < shards; ++s) {
      StoreOptions options;
      options.slot_count = slot_count;
      options.memory_budget_bytes = memory_budget_bytes;
      auto store = Store::create(options);
      raise_if_error(store.status());
      stores_.push_back(std::move(store).value());
    }
    auto shards_over_stores = LocalShards::create(stores_);
    raise_if_error(shards_over_stores.status());
    shards_ = std::move(shards_over_stores).value();
  }

  void create_table(const TableSchema& schema) {
    for (const auto& store : stores_) raise_if_error(store->create_table(schema));
  }
  void drop_table(std::uint32_t table_id) {
    for (const auto& store : stores_) raise_if_error(store->drop_table(table_id));
  }
  [[nodiscard]] std::uint64_t rows(std::uint32_t table_id) const {
    std::uint64_t rows = 0;
    for (const auto& store : stores_) {
      for (const TableStats& table : store->stats()) rows += table.table_id == table_id ? table.rows : 0;
    }
    return rows;
  }
  // Shards for one session: each session is a worker with sequences of its own.
  [[nodiscard]] std::shared_ptr<LocalShards> shards() const { return shards_->for_another_worker(); }

 private:
  std::vector<std::shared_ptr<Store>> stores_;
  std::shared_ptr<LocalShards> shards_;
};

}  // namespace

void bind_local_shards(py::module_& module) {
  py::class_<LocalShards, RowReader, std::shared_ptr<LocalShards>>(module, "LocalShards");
  py::class_<LocalCluster>(module, "LocalCluster")
      .def(py::init<std::uint32_t, std::uint32_t, std::uint64_t>(), py::kw_only(), py::arg("shards"),
           py::arg("slot_count"), py::arg("memory_budget_bytes"))
      .def(
          "create_table",
          [](LocalCluster& self, std::uint32_t id, std::uint32_t version, std::string name, std::uint32_t dim,
             int dtype, std::uint64_t seed, const py::tuple& init, const py::dict& optimizer, const py::dict& policy) {
            self.create_table(schema_of(id, version, std::move(name), dim, dtype, seed, init, optimizer, policy));
          },
          py::kw_only(), py::arg("id"), py::arg("version"), py::arg("name"), py::arg("dim"), py::arg("dtype"),
          py::arg("seed"), py::arg("init"), py::arg("optimizer"), py::arg("policy"))
      .def("drop_table", &LocalCluster::drop_table, py::arg("table_id"))
      .def("rows", &LocalCluster::rows, py::arg("table_id"))
      .def_property_readonly("shards", &LocalCluster::shards);
  module.def("id_of_name", [](const std::string& name) { return id_of_name(name); }, py::arg("name"));
}

}  // namespace sparserow::bindings

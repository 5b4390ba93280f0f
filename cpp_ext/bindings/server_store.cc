// Store and its schema for Python. Every call that touches rows runs without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "shared_arrays.h"
#include "shared_errors.h"
#include "shared_optimizer.h"
#include "shared_policy.h"
#include "store/ssd/ssd_tier.h"
#include "store/store.h"
#include "util/not_allowed.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

constexpr std::string_view kDtypes[] = {"float32", "bfloat16", "float16", "int8"};
constexpr std::string_view kInits[] = {"constant", "uniform", "normal", "xavier_uniform", "xavier_normal"};

template <class Enum, std::size_t kCount>
Enum parse(const std::string_view (&names)[kCount], const char* field, const std::string& text) {
  std::string allowed;
  for (std::size_t i = 0; i < kCount; ++i) {
    if (names[i] == text) return static_cast<Enum>(i);
    allowed += (i == 0 ? "" : ", ") + std::string(names[i]);
  }
  raise_if_error(not_allowed(field, text, allowed));
  return Enum{};
}

template <class Enum, std::size_t kCount>
std::string name_of(const std::string_view (&names)[kCount], Enum value) {
  return std::string(names[static_cast<std::size_t>(value)]);
}

void bind_schema(py::module_& module) {
  py::class_<InitSpec>(module, "InitSpec")
      .def(py::init([](const std::string& kind, float a, float b) {
             return InitSpec{parse<InitKind>(kInits, "InitSpec.kind", kind), a, b};
           }),
           py::kw_only(), py::arg("kind") = "constant", py::arg("a") = 0.0f, py::arg("b") = 0.0f)
      .def_property_readonly("kind", [](const InitSpec& self) { return name_of(kInits, self.kind); })
      .def_readonly("a", &InitSpec::a)
      .def_readonly("b", &InitSpec::b);

  py::class_<OptimizerSpec> spec(module, "OptimizerSpec");
  spec.def(py::init([](const std::string& kind, const py::kwargs& options) {
             return optimizer_of(parse<OptimizerKind>(kOptimizerNames, "OptimizerSpec.kind", kind), options);
           }),
           py::kw_only(), py::arg("kind") = "sgd")
      .def_property_readonly("kind", [](const OptimizerSpec& self) { return name_of(kOptimizerNames, self.kind); });
  for (const OptimizerOption& option : optimizer_options()) {
    spec.def_property_readonly(option.name.data(),
                               [&option](const OptimizerSpec& self) { return option_of(self, option); });
  }

  py::class_<TableSchema>(module, "TableSchema")
      .def(py::init([](std::uint32_t id, const std::string& name, std::uint32_t dim, std::uint32_t version,
                       const std::string& dtype, std::uint64_t seed, const InitSpec& init,
                       const OptimizerSpec& optimizer, const py::dict& policy) {
             return TableSchema{
                 id,        version,          name, dim, parse<Dtype>(kDtypes, "TableSchema.dtype", dtype), seed, init,
                 optimizer, policy_of(policy)};
           }),
           py::kw_only(), py::arg("id"), py::arg("name"), py::arg("dim"), py::arg("version") = 1,
           py::arg("dtype") = "float32", py::arg("seed") = 0, py::arg("init") = InitSpec{},
           py::arg("optimizer") = OptimizerSpec{}, py::arg("policy") = py::dict())
      .def_readonly("id", &TableSchema::id)
      .def_readonly("name", &TableSchema::name)
      .def_readonly("dim", &TableSchema::dim)
      .def_readonly("version", &TableSchema::version)
      .def_property_readonly("dtype", [](const TableSchema& self) { return name_of(kDtypes, self.dtype); })
      .def_readonly("seed", &TableSchema::seed)
      .def_readonly("init", &TableSchema::init)
      .def_readonly("optimizer", &TableSchema::optimizer)
      .def_property_readonly("has_filter", [](const TableSchema& self) { return self.policy.has_filter(); });
}

double wall_seconds(LockTimes times) { return static_cast<double>(times.wall_nanoseconds) * 1e-9; }
double cpu_seconds(LockTimes times) { return static_cast<double>(times.cpu_nanoseconds) * 1e-9; }

void bind_results(py::module_& module) {
  py::class_<TableStats>(module, "TableStats")
      .def_readonly("table_id", &TableStats::table_id)
      .def_readonly("name", &TableStats::name)
      .def_readonly("rows", &TableStats::rows)
      .def_readonly("row_bytes", &TableStats::row_bytes)
      .def_readonly("total_bytes", &TableStats::total_bytes)
      .def_readonly("ssd_rows", &TableStats::ssd_rows)
      .def_readonly("ssd_bytes", &TableStats::ssd_bytes)
      .def_readonly("rows_added", &TableStats::rows_added)
      .def_readonly("rows_evicted", &TableStats::rows_evicted)
      .def_property_readonly("refused", [](const TableStats& self) { return self.admission.refused; })
      .def_property_readonly("filter_entries", [](const TableStats& self) { return self.admission.entries; })
      .def_property_readonly("filter_bytes", [](const TableStats& self) { return self.admission.bytes; })
      .def_property_readonly("filter_error_rate", [](const TableStats& self) { return self.admission.error_rate; })
      .def_readonly("sweeps", &TableStats::sweeps)
      .def_readonly("swept_rows", &TableStats::swept_rows)
      .def_property_readonly("ages_steps", [](const TableStats& self) { return self.ages.steps; })
      .def_property_readonly("ages_seconds", [](const TableStats& self) { return self.ages.seconds; })
      .def_property_readonly("sweep_longest_hold_seconds",
                             [](const TableStats& self) { return wall_seconds(self.sweep_longest_lock); })
      .def_property_readonly("sweep_longest_hold_cpu_seconds",
                             [](const TableStats& self) { return cpu_seconds(self.sweep_longest_lock); });
  py::class_<SweepReport::Freed>(module, "SweepFreed")
      .def_readonly("rows", &SweepReport::Freed::rows)
      .def_readonly("bytes", &SweepReport::Freed::bytes);
  py::class_<SweepReport>(module, "SweepReport")
      .def_readonly("rows_seen", &SweepReport::rows_seen)
      .def_readonly("freed", &SweepReport::freed)
      .def_readonly("slices", &SweepReport::slices)
      .def_property_readonly("longest_hold_seconds",
                             [](const SweepReport& self) { return wall_seconds(self.longest_lock); })
      .def_property_readonly("longest_hold_cpu_seconds",
                             [](const SweepReport& self) { return cpu_seconds(self.longest_lock); })
      .def_readonly("is_complete", &SweepReport::is_complete);
}

TableSchema schema_or_raise(const Store& store, std::uint32_t table_id) {
  std::optional<TableSchema> schema = store.schema(table_id);
  if (!schema) raise_if_error({Code::kNotFound, "table id " + std::to_string(table_id) + " does not exist"});
  return *schema;
}

// Straight into the caller's float32 matrix: nothing is allocated.
void pull_into(const Store& store, std::uint32_t table_id, const py::array& keys, py::array& out) {
  const auto wanted = keys_of(keys);
  (void)matrix_of(out, "out", wanted.size(), schema_or_raise(store, table_id).dim);
  auto* rows = static_cast<std::byte*>(out.mutable_data());
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.pull(table_id, wanted, Dtype::kFloat32, rows);
  }
  raise_if_error(status);
}

py::tuple pull(const Store& store, std::uint32_t table_id, const py::array& keys, const std::string& dtype) {
  const auto wanted = keys_of(keys);
  const auto out_dtype = parse<Dtype>(kDtypes, "dtype", dtype);
  const std::uint32_t dim = schema_or_raise(store, table_id).dim;
  const py::dtype element = py::dtype(out_dtype == Dtype::kFloat32   ? "float32"
                                      : out_dtype == Dtype::kFloat16 ? "float16"
                                                                     : "uint16");
  const auto count = static_cast<py::ssize_t>(wanted.size());
  py::array rows(element, std::vector<py::ssize_t>{count, static_cast<py::ssize_t>(dim)});
  py::array_t<std::uint64_t> versions(count);
  py::array_t<bool> found(count);
  auto* out = static_cast<std::byte*>(rows.mutable_data());
  const PullExtras extras{.versions = {versions.mutable_data(), wanted.size()},
                          .found = {reinterpret_cast<std::uint8_t*>(found.mutable_data()), wanted.size()}};
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.pull(table_id, wanted, out_dtype, out, extras);
  }
  raise_if_error(status);
  return py::make_tuple(rows, versions, found);
}

void apply(Store& store, std::uint32_t table_id, const py::array& keys, const py::array& grads, float lr,
           float grad_scale, std::uint64_t job, std::int64_t step) {
  const auto wanted = keys_of(keys);
  const float* values = matrix_of(grads, "grads", wanted.size(), schema_or_raise(store, table_id).dim);
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.apply(table_id, wanted, values, {.lr = lr, .grad_scale = grad_scale, .job = job, .step = step});
  }
  raise_if_error(status);
}

void assign(Store& store, std::uint32_t table_id, const py::array& keys, const py::array& rows) {
  const auto wanted = keys_of(keys);
  const float* values = matrix_of(rows, "rows", wanted.size(), schema_or_raise(store, table_id).dim);
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.assign(table_id, wanted, values);
  }
  raise_if_error(status);
}

std::uint64_t erase(Store& store, std::uint32_t table_id, const py::array& keys) {
  const auto wanted = keys_of(keys);
  std::optional<Result<std::uint64_t>> erased;
  {
    const py::gil_scoped_release released;
    erased.emplace(store.erase(table_id, wanted));
  }
  return value_or_raise(std::move(*erased));
}

py::tuple scan(const Store& store, std::uint32_t table_id, std::uint64_t cursor, std::uint32_t max_rows,
               bool with_state) {
  const auto dim = static_cast<py::ssize_t>(schema_or_raise(store, table_id).dim);
  std::optional<Result<ScanPage>> scanned;
  {
    const py::gil_scoped_release released;
    scanned.emplace(store.scan(table_id, cursor, max_rows, with_state));
  }
  ScanPage page = value_or_raise(std::move(*scanned));
  const auto count = static_cast<py::ssize_t>(page.keys.size());
  const py::ssize_t state_floats = count == 0 ? 0 : static_cast<py::ssize_t>(page.state.size()) / count;
  return py::make_tuple(array_of(std::move(page.keys), {count}), array_of(std::move(page.versions), {count}),
                        array_of(std::move(page.update_counts), {count}), array_of(std::move(page.rows), {count, dim}),
                        array_of(std::move(page.state), {count, state_floats}), page.next_cursor);
}

void fetch_to_memory(Store& store, std::uint32_t table_id, const py::array& keys) {
  const auto wanted = keys_of(keys);
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.fetch_to_memory(table_id, wanted);
  }
  raise_if_error(status);
}

SweepReport sweep(Store& store, std::uint32_t table_id, bool dry_run, double share, double pause_ratio,
                  bool by_seconds) {
  std::optional<Result<SweepReport>> report;
  {
    const py::gil_scoped_release released;
    report.emplace(store.sweep(
        table_id, {.dry_run = dry_run, .by_seconds = by_seconds, .share = share, .pause_ratio = pause_ratio}));
  }
  return value_or_raise(std::move(*report));
}

py::array_t<std::uint64_t> filter_image(const Store& store, std::uint32_t table_id, std::uint32_t slot) {
  std::vector<std::uint64_t> image = value_or_raise(store.filter_image(table_id, slot));
  const auto size = static_cast<py::ssize_t>(image.size());
  return array_of(std::move(image), {size});
}

void load_filter(Store& store, std::uint32_t table_id, std::uint32_t slot, const py::array& image) {
  raise_if_error(store.load_filter(table_id, slot, keys_of(image)));
}

void write_back(Store& store) {
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.write_back();
  }
  raise_if_error(status);
}

py::object tier_stats(const Store& store) {
  const std::optional<TierStats> stats = store.tier_stats();
  if (!stats) return py::none();
  py::dict out;
  out["hits"] = stats->hits;
  out["misses"] = stats->misses;
  out["brought_ahead"] = stats->prefetched;
  out["rows_evicted"] = stats->rows_evicted;
  out["evicted_ahead"] = stats->background_evicted;
  out["is_making_room"] = stats->is_making_room;
  out["resident_bytes"] = stats->resident_bytes;
  out["longest_hold_seconds"] = wall_seconds(stats->longest_lock);
  out["longest_hold_cpu_seconds"] = cpu_seconds(stats->longest_lock);
  out["ssd_file_bytes"] = stats->ssd.file_bytes;
  out["ssd_garbage_bytes"] = stats->ssd.garbage_bytes;
  out["ssd_memory_bytes"] = stats->ssd.memory_bytes;
  out["ssd_index_bytes"] = stats->ssd.index_bytes;
  out["ssd_rows_read"] = stats->ssd.rows_read;
  out["ssd_rows_waited"] = stats->ssd.rows_waited;
  out["ssd_rows_absent"] = stats->ssd.rows_absent;
  out["ssd_rows_written"] = stats->ssd.rows_written;
  out["ssd_bytes_read"] = stats->ssd.bytes_read;
  out["ssd_bytes_written"] = stats->ssd.bytes_written;
  out["ssd_reads"] = stats->ssd.reads;
  out["ssd_read_seconds"] = static_cast<double>(stats->ssd.read_nanoseconds) * 1e-9;
  out["ssd_disk_bytes_read"] = stats->ssd.disk_bytes_read;
  out["ssd_disk_bytes_written"] = stats->ssd.disk_bytes_written;
  out["ssd_background_jobs"] = stats->ssd.background_jobs;
  out["ssd_writes"] = stats->ssd.writes;
  out["ssd_write_seconds"] = static_cast<double>(stats->ssd.write_nanoseconds) * 1e-9;
  return out;
}

// An error is raised once the GIL is back.
std::shared_ptr<Store> made(const StoreOptions& options) {
  std::optional<Result<std::unique_ptr<Store>>> store;
  {
    const py::gil_scoped_release released;
    store.emplace(Store::create(options));
  }
  return std::shared_ptr<Store>(value_or_raise(std::move(*store)));
}

void bind_store_class(py::module_& module) {
  py::class_<Store, std::shared_ptr<Store>>(module, "Store")
      .def(py::init([](std::uint64_t memory_budget_bytes, std::uint32_t slot_count, std::uint16_t lineage,
                       std::string ssd_path, std::uint64_t ssd_bytes, std::uint64_t cluster_id, std::uint16_t shard,
                       std::uint64_t change_log_bytes, const std::string& ssd_engine, bool ssd_direct_io) {
             return made({.memory_budget_bytes = memory_budget_bytes,
                          .slot_count = slot_count,
                          .lineage = lineage,
                          .change_log_bytes = change_log_bytes,
                          .ssd = {.path = std::move(ssd_path),
                                  .max_bytes = ssd_bytes,
                                  .cluster_id = cluster_id,
                                  .shard = shard,
                                  .engine = value_or_raise(ssd_engine_of(ssd_engine)),
                                  .direct_io = ssd_direct_io}});
           }),
           py::kw_only(), py::arg("memory_budget_bytes") = 0, py::arg("slot_count") = kDefaultSlotCount,
           py::arg("lineage") = 1, py::arg("ssd_path") = "", py::arg("ssd_bytes") = 0, py::arg("cluster_id") = 0,
           py::arg("shard") = 0, py::arg("change_log_bytes") = StoreOptions{}.change_log_bytes,
           py::arg("ssd_engine") = "pages", py::arg("ssd_direct_io") = false)
      .def(
          "create_table", [](Store& store, const TableSchema& schema) { raise_if_error(store.create_table(schema)); },
          py::arg("schema"))
      .def(
          "drop_table", [](Store& store, std::uint32_t table_id) { raise_if_error(store.drop_table(table_id)); },
          py::arg("table_id"))
      .def("schema", &Store::schema, py::arg("table_id"))
      .def("pull", &pull, py::arg("table_id"), py::arg("keys"), py::kw_only(), py::arg("dtype") = "float32")
      .def("pull_into", &pull_into, py::arg("table_id"), py::arg("keys"), py::arg("out"))
      .def("apply", &apply, py::arg("table_id"), py::arg("keys"), py::arg("grads"), py::kw_only(), py::arg("lr"),
           py::arg("grad_scale") = 1.0f, py::arg("job") = 0, py::arg("step") = -1)
      .def("assign", &assign, py::arg("table_id"), py::arg("keys"), py::arg("rows"))
      .def("erase", &erase, py::arg("table_id"), py::arg("keys"))
      .def("scan", &scan, py::arg("table_id"), py::kw_only(), py::arg("cursor") = 0, py::arg("max_rows") = 65536,
           py::arg("with_state") = false)
      .def("sweep", &sweep, py::arg("table_id"), py::kw_only(), py::arg("dry_run") = false, py::arg("share") = 1.0,
           py::arg("pause_ratio") = 0.0, py::arg("by_seconds") = true)
      .def("stop_sweeps", &Store::stop_sweeps)
      .def("filter_image", &filter_image, py::arg("table_id"), py::arg("slot"))
      .def("load_filter", &load_filter, py::arg("table_id"), py::arg("slot"), py::arg("image"))
      .def("fetch_to_memory", &fetch_to_memory, py::arg("table_id"), py::arg("keys"))
      .def("write_back", &write_back)
      .def("tier_stats", &tier_stats)
      .def(
          "stats",
          [](const Store& store, const std::vector<std::uint32_t>& table_ids) { return store.stats(table_ids); },
          py::arg("table_ids") = std::vector<std::uint32_t>{})
      .def(
          "set_memory_shares",
          [](Store& store, std::map<std::string, double> shares) {
            raise_if_error(store.set_memory_shares(std::move(shares)));
          },
          py::arg("shares"))
      .def_property_readonly("used_bytes", &Store::used_bytes)
      .def_property_readonly("reserved_bytes",
                             [](const Store& store) {
                               const ReserveStats stats = store.reserve_stats();
                               return stats.bytes + stats.rest_bytes;
                             })
      .def_property_readonly("is_reserve_filling", [](const Store& store) { return store.reserve_stats().is_filling; })
      .def_property_readonly("memory_budget_bytes",
                             [](const Store& store) { return store.options().memory_budget_bytes; })
      .def_property_readonly("slot_count", [](const Store& store) { return store.options().slot_count; })
      .def_property_readonly("lineage", [](const Store& store) { return store.lineage(); });
}

void bind_hash(py::module_& module) {
  module.attr("HASH_VERSION") = kHashVersion;
  module.def("row_hash", &row_hash, py::arg("table_id"), py::arg("key"));
  module.def(
      "slot_of",
      [](std::uint64_t hash, std::uint32_t slot_count) {
        if (!std::has_single_bit(slot_count) || slot_count < 2 || slot_count > 65536) {
          raise_if_error(not_allowed("slot_count", slot_count, kSlotCounts));
        }
        return slot_of(hash, slot_count);
      },
      py::arg("hash"), py::arg("slot_count") = kDefaultSlotCount);
  module.def("id_of_name", [](const std::string& name) { return id_of_name(name); }, py::arg("name"));
}

}  // namespace

void bind_store(py::module_& module) {
  bind_schema(module);
  bind_results(module);
  bind_store_class(module);
  bind_hash(module);
  module.def("has_rocksdb", &SsdTier::has_rocksdb);
}

}  // namespace sparserow::bindings

// Cuts for Python: the rows of one instant, the windows of that instant, and the way back.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rpc/server/server.h"
#include "shared_arrays.h"
#include "shared_errors.h"
#include "store/snapshot.h"
#include "util/not_allowed.h"
#include "util/step_back.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

using SharedSnapshot = std::shared_ptr<Store::Snapshot>;

// The large columns of some pages, to be filled again. Thread-safe.
class UsedPages {
 public:
  void put(MappedVector<std::byte> weights) { put(weights_, std::move(weights)); }
  void put(MappedVector<float> state) { put(state_, std::move(state)); }
  SnapshotPage take() {
    const std::lock_guard lock(mutex_);
    SnapshotPage page;
    if (!weights_.empty()) {
      page.weights = std::move(weights_.back());
      weights_.pop_back();
    }
    if (!state_.empty()) {
      page.state = std::move(state_.back());
      state_.pop_back();
    }
    return page;
  }

 private:
  template <class T>
  void put(std::vector<MappedVector<T>>& free, MappedVector<T> column) {
    const std::lock_guard lock(mutex_);
    if (free.size() < kMost) free.push_back(std::move(column));
  }

  static constexpr std::size_t kMost = 2;
  std::mutex mutex_;
  std::vector<MappedVector<std::byte>> weights_;
  std::vector<MappedVector<float>> state_;
};

// As array_of(); the vector goes back when the array is gone.
template <class T>
py::array lent_array(MappedVector<T> values, std::vector<py::ssize_t> shape, const std::shared_ptr<UsedPages>& owner,
                     const char* dtype) {
  struct Lent {
    MappedVector<T> values;
    std::shared_ptr<UsedPages> owner;
    ~Lent() { owner->put(std::move(values)); }
  };
  auto lent = std::make_unique<Lent>(std::move(values), owner);
  const T* data = lent->values.data();
  py::capsule lender(lent.get(), [](void* memory) { delete static_cast<Lent*>(memory); });
  (void)lent.release();
  return {py::dtype(dtype), std::move(shape), data, lender};
}

// Ends with the Python object, also when a writer still holds the snapshot itself.
struct SnapshotBox {
  explicit SnapshotBox(std::shared_ptr<Store> owner, SharedSnapshot taken)
      : store(std::move(owner)), snapshot(std::move(taken)) {}
  SnapshotBox(const SnapshotBox&) = delete;
  SnapshotBox& operator=(const SnapshotBox&) = delete;
  ~SnapshotBox() { snapshot->end(); }

  std::shared_ptr<Store> store;
  SharedSnapshot snapshot;
  // Memory of pages that Python is done with: pages that are touched for the first time cost more than their copying.
  std::shared_ptr<UsedPages> used = std::make_shared<UsedPages>();
};

// The pace of one thread that writes files of a dump.
struct SavePace {
  SharedSnapshot snapshot;
  Store::Snapshot::Pace pace;
};

SnapshotOptions options_of(std::uint64_t side_budget_bytes, std::uint32_t longest_stall_ms,
                           const std::optional<py::array>& since) {
  SnapshotOptions options;
  options.side_budget_bytes = side_budget_bytes;
  options.longest_stall = std::chrono::milliseconds(longest_stall_ms);
  if (since) {
    const auto versions = keys_of(*since);
    options.since.assign(versions.begin(), versions.end());
  }
  return options;
}

std::unique_ptr<SnapshotBox> snapshot(const std::shared_ptr<Store>& store, std::uint64_t side_budget_bytes,
                                      std::uint32_t longest_stall_ms, const std::optional<py::array>& since) {
  SnapshotOptions options = options_of(side_budget_bytes, longest_stall_ms, since);
  std::optional<Result<SharedSnapshot>> made;
  {
    const py::gil_scoped_release released;
    made.emplace(store->snapshot(std::move(options)));
  }
  return std::make_unique<SnapshotBox>(store, value_or_raise(std::move(*made)));
}

using NextPage = Result<SnapshotPage> (Store::Snapshot::*)(std::uint32_t, std::uint64_t, SnapshotPage);

template <NextPage kNext>
py::tuple next_page(SnapshotBox& box, std::uint32_t table_id, std::uint64_t max_bytes) {
  std::uint32_t dim = 0;
  Dtype dtype = Dtype::kFloat32;
  if (const TableSchema* schema = box.snapshot->schema(table_id); schema != nullptr) {
    dim = schema->dim;
    dtype = schema->dtype;
  }
  std::optional<Result<SnapshotPage>> got;
  {
    const py::gil_scoped_release released;
    got.emplace((*box.snapshot.*kNext)(table_id, max_bytes, box.used->take()));
  }
  SnapshotPage page = value_or_raise(std::move(*got));
  const auto n = static_cast<py::ssize_t>(page.keys.size());
  const py::ssize_t state_floats = n == 0 ? 0 : static_cast<py::ssize_t>(page.state.size()) / n;
  const auto column = [](std::vector<std::uint32_t>& values) {
    const auto count = static_cast<py::ssize_t>(values.size());
    return array_of(std::move(values), {count});
  };
  const char* element = dtype == Dtype::kFloat32 ? "float32" : dtype == Dtype::kFloat16 ? "float16" : "uint16";
  return py::make_tuple(array_of(std::move(page.keys), {n}), array_of(std::move(page.versions), {n}),
                        array_of(std::move(page.update_counts), {n}),
                        lent_array(std::move(page.weights), {n, static_cast<py::ssize_t>(dim)}, box.used, element),
                        lent_array(std::move(page.state), {n, state_floats}, box.used, "float32"),
                        column(page.age_steps), column(page.push_seconds), page.first_slot, page.end_slot);
}

template <class T>
std::span<const T> column_of(const py::array& array, const char* name) {
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(array)) {
    raise_if_error(must_be(name, "a contiguous array of its dtype"));
  }
  return {static_cast<const T*>(array.data()), static_cast<std::size_t>(array.size())};
}

void install(Store& store, std::uint32_t table_id, const py::array& keys, const py::array& versions,
             const py::array& update_counts, const py::array& weights, const py::array& state,
             const py::array& age_steps, const py::array& push_seconds) {
  if ((weights.flags() & py::array::c_style) == 0) {
    raise_if_error(must_be("weights", "a contiguous array"));
  }
  const StoredRows rows{
      .keys = keys_of(keys),
      .versions = column_of<std::uint64_t>(versions, "versions"),
      .update_counts = column_of<std::uint32_t>(update_counts, "update_counts"),
      .weights = {static_cast<const std::byte*>(weights.data()), static_cast<std::size_t>(weights.nbytes())},
      .state = column_of<float>(state, "state"),
      .age_steps = column_of<std::uint32_t>(age_steps, "age_steps"),
      .push_seconds = column_of<std::uint32_t>(push_seconds, "push_seconds")};
  Status status;
  {
    const py::gil_scoped_release released;
    status = store.install(table_id, rows);
  }
  raise_if_error(status);
}

void set_sequences(Store& store, const py::array& slots, const py::array& sequences) {
  const auto which = column_of<std::uint32_t>(slots, "slots");
  const auto values = keys_of(sequences);
  if (which.size() != values.size()) raise_if_error(must_be("sequences", "one for each slot"));
  for (std::size_t i = 0; i < which.size(); ++i) {
    if (which[i] >= store.options().slot_count) {
      raise_if_error(not_allowed("slots", which[i], below_text(store.options().slot_count)));
    }
    store.set_sequence(which[i], values[i]);
  }
}

py::dict dict_of(const JobImage& job) {
  py::list workers;
  for (const WorkerImage& worker : job.workers) {
    const WindowImage& window = worker.window;
    py::dict out;
    out["worker_id"] = worker.worker_id;
    out["epoch"] = worker.epoch;
    out["forgotten_below"] = window.forgotten_below;
    out["committed_sequence"] = window.committed_sequence;
    out["committed_step"] = window.committed_step;
    out["done_step"] = window.done_step;
    out["answers"] = window.answers;
    out["aborted"] = window.aborted;
    out["steps_ahead"] = window.steps_ahead;
    out["steps_taken"] = window.steps_taken;
    out["writes_taken"] = window.writes_taken;
    workers.append(out);
  }
  py::dict out;
  out["job_id"] = job.job_id;
  out["generation"] = job.generation;
  out["completed"] = job.completed;
  out["workers"] = workers;
  return out;
}

JobImage image_of(const py::dict& job) {
  JobImage image{.job_id = job["job_id"].cast<std::uint32_t>(),
                 .generation = job["generation"].cast<std::uint32_t>(),
                 .completed = job["completed"].cast<std::int64_t>(),
                 .lossy = job.contains("lossy") && job["lossy"].cast<bool>(),
                 .workers = {}};
  for (const py::handle worker : job["workers"]) {
    image.workers.push_back({worker["worker_id"].cast<std::uint32_t>(),
                             worker["epoch"].cast<std::uint32_t>(),
                             {.forgotten_below = worker["forgotten_below"].cast<std::uint64_t>(),
                              .committed_sequence = worker["committed_sequence"].cast<std::uint64_t>(),
                              .committed_step = worker["committed_step"].cast<std::int64_t>(),
                              .done_step = worker["done_step"].cast<std::int64_t>(),
                              .answers = worker["answers"].cast<std::vector<std::pair<std::uint64_t, std::uint64_t>>>(),
                              .aborted = worker["aborted"].cast<std::vector<std::uint64_t>>(),
                              .steps_ahead = worker["steps_ahead"].cast<std::vector<std::int64_t>>(),
                              .steps_taken = worker["steps_taken"].cast<std::uint64_t>(),
                              .writes_taken = worker["writes_taken"].cast<std::uint64_t>()}});
  }
  return image;
}

using TargetTuple = std::tuple<std::uint32_t, std::uint64_t, std::int64_t,
                               std::vector<std::tuple<std::uint32_t, std::uint32_t, std::uint64_t>>>;

py::tuple cut(rpc::Server& server, std::shared_ptr<Store> store, const std::vector<TargetTuple>& jobs,
              std::uint32_t deadline_ms, std::uint64_t side_budget_bytes, std::uint32_t longest_stall_ms,
              const std::optional<py::array>& since) {
  std::vector<CutTarget> targets;
  for (const auto& [job_id, operation, step, workers] : jobs) {
    CutTarget target{.job_id = job_id, .operation = operation, .step = step, .workers = {}};
    for (const auto& [worker_id, epoch, sequence] : workers) target.workers.push_back({worker_id, epoch, sequence});
    targets.push_back(std::move(target));
  }
  SnapshotOptions options = options_of(side_budget_bytes, longest_stall_ms, since);
  auto made = [&] {
    const py::gil_scoped_release released;
    return server.cut(targets, std::chrono::milliseconds(deadline_ms), std::move(options));
  }();
  rpc::Server::Cut taken = value_or_raise(std::move(made));
  py::list images;
  for (const JobImage& job : taken.jobs) images.append(dict_of(job));
  return py::make_tuple(std::make_unique<SnapshotBox>(std::move(store), std::move(taken.rows)), images);
}

py::dict stats_of(const SnapshotBox& box) {
  const SnapshotStats stats = box.snapshot->stats();
  py::dict out;
  out["rows_saved"] = stats.rows_saved;
  out["side_bytes_most"] = stats.side_bytes_most;
  out["writes_stalled"] = stats.writes_stalled;
  return out;
}

}  // namespace

void bind_snapshot(py::module_& module) {
  module.def("step_back", &step_back, py::arg("nice"));
  py::class_<SavePace>(module, "SavePace")
      .def("begin", [](SavePace& self) { self.pace.slice = LockTimer(); })
      .def(
          "pause", [](SavePace& self) { self.snapshot->keep_pace(self.pace); },
          py::call_guard<py::gil_scoped_release>());
  py::class_<SnapshotBox>(module, "Snapshot")
      .def("pace", [](const SnapshotBox& box) { return SavePace{box.snapshot, {}}; })
      .def("next", &next_page<&Store::Snapshot::next>, py::arg("table_id"), py::kw_only(), py::arg("max_bytes"))
      .def("next_images", &next_page<&Store::Snapshot::next_images>, py::arg("table_id"), py::kw_only(),
           py::arg("max_bytes"))
      .def(
          "page_bytes", [](const SnapshotBox& box, std::uint64_t most) { return box.snapshot->page_bytes(most); },
          py::arg("most"))
      .def(
          "end", [](SnapshotBox& box) { box.snapshot->end(); }, py::call_guard<py::gil_scoped_release>())
      .def(
          "filter_image",
          [](const SnapshotBox& box, std::uint32_t table_id, std::uint32_t slot) {
            std::vector<std::uint64_t> image = box.snapshot->filter_image(table_id, slot);
            const auto size = static_cast<py::ssize_t>(image.size());
            return array_of(std::move(image), {size});
          },
          py::arg("table_id"), py::arg("slot"))
      .def("stats", &stats_of)
      .def_property_readonly("lineage", [](const SnapshotBox& box) { return box.snapshot->lineage(); })
      .def_property_readonly("tables", [](const SnapshotBox& box) { return box.snapshot->tables(); })
      .def_property_readonly("whole_slots",
                             [](const SnapshotBox& box) {
                               py::array_t<bool> whole(static_cast<py::ssize_t>(box.snapshot->slot_versions().size()));
                               for (py::ssize_t slot = 0; slot < whole.size(); ++slot) {
                                 whole.mutable_at(slot) = box.snapshot->is_whole(static_cast<std::uint32_t>(slot));
                               }
                               return whole;
                             })
      .def_property_readonly("slot_versions", [](const SnapshotBox& box) {
        const auto& versions = box.snapshot->slot_versions();
        return py::array_t<std::uint64_t>(static_cast<py::ssize_t>(versions.size()), versions.data());
      });

  const SnapshotOptions defaults;
  const auto stall_ms = static_cast<std::uint32_t>(defaults.longest_stall.count());
  py::object store = module.attr("Store");
  auto store_class = py::reinterpret_borrow<py::class_<Store, std::shared_ptr<Store>>>(store);
  store_class
      .def("snapshot", &snapshot, py::kw_only(), py::arg("side_budget_bytes") = 0,
           py::arg("longest_stall_ms") = stall_ms, py::arg("since") = py::none())
      .def("install", &install, py::arg("table_id"), py::arg("keys"), py::arg("versions"), py::arg("update_counts"),
           py::arg("weights"), py::arg("state"), py::arg("age_steps") = py::array_t<std::uint32_t>(0),
           py::arg("push_seconds") = py::array_t<std::uint32_t>(0))
      .def("set_sequences", &set_sequences, py::arg("slots"), py::arg("sequences"))
      .def("set_lineage", &Store::set_lineage, py::arg("lineage"));
  auto server_class = py::reinterpret_borrow<py::class_<rpc::Server>>(module.attr("Server"));
  server_class
      .def("cut", &cut, py::arg("store"), py::arg("jobs"), py::kw_only(), py::arg("deadline_ms"),
           py::arg("side_budget_bytes") = 0, py::arg("longest_stall_ms") = stall_ms, py::arg("since") = py::none())
      .def(
          "install_jobs",
          [](rpc::Server& server, const std::vector<py::dict>& jobs) {
            std::vector<JobImage> images;
            for (const py::dict& job : jobs) images.push_back(image_of(job));
            server.install_jobs(images);
          },
          py::arg("jobs"));
}

}  // namespace sparserow::bindings

// _client: the session, its merged pull and the key-level calls, as worker/session/session.py and
// worker/session/table.py use them. Every call that may wait or copy rows releases the GIL.
#include "bindings/client_session.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <array>
#include <chrono>
#include <limits>

#include "bindings/shared_dtype.h"
#include "bindings/shared_errors.h"
#include "session/planned_ids.h"
#include "session/prefetcher.h"
#include "session/session.h"
#include "session/table_access.h"

namespace sparserow::bindings {
namespace {

namespace py = pybind11;
using Keys = py::array_t<std::uint64_t, py::array::c_style>;
using Rows = py::array_t<float, py::array::c_style>;
using Unlocked = py::call_guard<py::gil_scoped_release>;

// (n) keys and their (n, dim) values, or InvalidArgument naming the one of the wrong shape.
void check_rows(const Keys& keys, const Rows& rows, std::uint32_t dim, const char* name) {
  if (keys.ndim() == 1 && rows.ndim() == 2 && rows.shape(0) == keys.shape(0) && rows.shape(1) == dim) return;
  raise_if_error(Status(Code::kInvalidArgument, std::string(name) + ": the shape must be (" +
                                                    std::to_string(keys.size()) + ", " + std::to_string(dim) +
                                                    ") for keys of shape (n)"));
}

std::span<const std::uint64_t> span_of(const Keys& keys) {
  if (keys.ndim() != 1) raise_if_error(Status(Code::kInvalidArgument, "keys: must have one dimension"));
  return {keys.data(), static_cast<std::size_t>(keys.size())};
}

// The batch tensors of a merged pull: (address the ops see, address on the host, sizes, strides, item bytes).
class BatchTensors {
 public:
  explicit BatchTensors(const py::sequence& roots) : tensors_(roots.size()) {
    for (std::size_t r = 0; r < tensors_.size(); ++r) {
      const auto root = roots[r].cast<py::tuple>();
      tensors_[r].view.data = reinterpret_cast<const void*>(root[0].cast<std::uintptr_t>());
      tensors_[r].host = reinterpret_cast<const void*>(root[1].cast<std::uintptr_t>());
      sizes_.push_back(root[2].cast<std::vector<std::int64_t>>());
      strides_.push_back(root[3].cast<std::vector<std::int64_t>>());
      tensors_[r].view.item_bytes = root[4].cast<std::uint32_t>();
    }
    for (std::size_t r = 0; r < tensors_.size(); ++r) {
      tensors_[r].view.sizes = sizes_[r];
      tensors_[r].view.strides = strides_[r];
    }
  }
  [[nodiscard]] std::span<const BatchTensor> span() const { return tensors_; }

 private:
  std::vector<BatchTensor> tensors_;
  std::vector<std::vector<std::int64_t>> sizes_;
  std::vector<std::vector<std::int64_t>> strides_;
};

py::dict stats_of(const Session& session) {
  py::dict out;
  session.stats().for_each([&out](const char* name, std::uint64_t value) { out[name] = value; });
  return out;
}

std::shared_ptr<Session> make_session(std::shared_ptr<RowReader> shards, std::int64_t first_step,
                                      std::uint64_t first_sequence, bool clocked, bool grad_sum,
                                      std::int64_t deadline_ms, std::uint64_t cache_bytes, std::int64_t cache_staleness,
                                      bool cache_exact, const std::string& cache_dtype, std::uint64_t no_grad_bytes,
                                      std::int64_t no_grad_ms) {
  SessionOptions options;
  options.first_step = first_step;
  options.first_sequence = first_sequence;
  options.clocked = clocked;
  options.grad_sum = grad_sum;
  options.deadline = std::chrono::milliseconds(deadline_ms);
  options.cache = {cache_bytes, cache_staleness, cache_exact ? OwnCommits::kExact : OwnCommits::kBounded,
                   dtype_of("cache.dtype", cache_dtype)};
  options.no_grad_bytes = no_grad_bytes;
  options.no_grad_age = std::chrono::milliseconds(no_grad_ms);
  return value_or_raise(Session::create(std::move(shards), options));
}

// (binding, root, "whole", "select" or "narrow", dimension, start, length) of each part.
using PartTuple = std::tuple<std::string, std::uint32_t, std::string, std::uint32_t, std::int64_t, std::int64_t>;

PlannedIds planned_ids(const std::vector<PartTuple>& parts) {
  PlannedIds plan;
  for (const auto& [binding, root, kind, dim, start, length] : parts) {
    const auto number =
        kind == "whole" ? IdPart::Kind::kWhole : (kind == "select" ? IdPart::Kind::kSelect : IdPart::Kind::kNarrow);
    plan.parts.push_back({binding, root, number, dim, start, length});
  }
  return plan;
}

// (binding, address, sizes, strides, bytes per item) of each lookup.
py::list lookups_of(const LookupTrace& trace) {
  py::list out;
  for (const TracedLookup& lookup : trace.lookups()) {
    out.append(py::make_tuple(lookup.binding, reinterpret_cast<std::uintptr_t>(lookup.data),
                              py::tuple(py::cast(lookup.sizes)), py::tuple(py::cast(lookup.strides)),
                              lookup.item_bytes));
  }
  return out;
}

// pybind cannot move a unique_ptr out of an argument: the box is emptied when its batch is handed over.
struct PrefetchedBox {
  std::unique_ptr<PrefetchedBatch> batch;
};

PrefetchedBatch& open(PrefetchedBox& box) {
  if (!box.batch) raise_if_error(Status(Code::kFailedPrecondition, "prefetch: this batch was handed over already"));
  return *box.batch;
}

void bind_prefetcher(py::module_& module) {
  py::class_<PrefetchedBox>(module, "PrefetchedBatch").def_property_readonly("rows", [](PrefetchedBox& box) {
    return open(box).rows();
  });
  py::class_<Prefetcher>(module, "Prefetcher")
      .def(py::init([](std::shared_ptr<Session> session, bool exact, std::size_t threads) {
             return std::make_unique<Prefetcher>(std::move(session), exact, threads);
           }),
           py::arg("session"), py::kw_only(), py::arg("exact"), py::arg("threads"))
      .def(
          "index",
          [](Prefetcher& self, const PlannedIds& plan, const py::sequence& roots) {
            const BatchTensors tensors(roots);
            PrefetchedBox box;
            {
              const py::gil_scoped_release unlocked;
              const MergedIds ids = ids_of(plan, tensors.span());
              box.batch = value_or_raise(self.index(ids.lookups));
            }
            return box;
          },
          py::arg("plan"), py::arg("roots"))
      .def(
          "hint",
          [](Prefetcher& self, PrefetchedBox& box) {
            PrefetchedBatch& batch = open(box);
            const py::gil_scoped_release unlocked;
            raise_if_error(self.hint(batch));
          },
          py::arg("batch"))
      .def(
          "pull",
          [](Prefetcher& self, PrefetchedBox& box, std::int64_t step) {
            PrefetchedBatch& batch = open(box);
            const py::gil_scoped_release unlocked;
            raise_if_error(self.pull(batch, step));
          },
          py::arg("batch"), py::arg("step"))
      .def(
          "pack",
          [](Prefetcher& self, PrefetchedBox& box, const PlannedIds& plan, const py::sequence& roots) {
            const BatchTensors tensors(roots);
            PrefetchedBatch& batch = open(box);
            std::vector<std::uint32_t> parts;
            std::unique_ptr<LookupPack> pack;
            {
              const py::gil_scoped_release unlocked;
              const MergedIds ids = ids_of(plan, tensors.span());
              pack = value_or_raise(self.pack(batch, ids.lookups, parts));
            }
            return py::make_tuple(std::move(pack), std::move(parts));
          },
          py::arg("batch"), py::arg("plan"), py::arg("roots"))
      .def(
          "hand_over",
          [](Prefetcher& self, PrefetchedBox& box, bool with_gradient, LookupPack* pack) {
            open(box);
            auto batch = std::move(box.batch);
            const py::gil_scoped_release unlocked;
            const NoGradScope scope(!with_gradient);
            return value_or_raise(self.hand_over(std::move(batch), pack));
          },
          py::arg("batch"), py::kw_only(), py::arg("with_gradient") = true, py::arg("pack") = nullptr);
}

void bind_planned_ids(py::module_& module) {
  py::class_<LookupTrace, std::shared_ptr<LookupTrace>>(module, "LookupTrace")
      .def_property_readonly("lookups", &lookups_of);
  py::class_<PlannedIds>(module, "PlannedIds")
      .def(py::init(&planned_ids), py::arg("parts"))
      .def_property_readonly("size", [](const PlannedIds& plan) { return plan.parts.size(); });
}

void bind_table(py::module_& module) {
  py::class_<TableAccess>(module, "TableAccess")
      .def(py::init([](std::shared_ptr<Session> session, std::string name, std::uint32_t table_id,
                       std::uint32_t schema_version, std::uint32_t dim) {
             return TableAccess(std::move(session), {table_id, schema_version, dim, std::move(name)});
           }),
           py::arg("session"), py::kw_only(), py::arg("name"), py::arg("table_id"), py::arg("schema_version"),
           py::arg("dim"))
      .def(
          "pull",
          [](TableAccess& self, const Keys& keys) {
            const auto span = span_of(keys);
            Rows rows({keys.size(), static_cast<py::ssize_t>(self.table().dim)});
            float* to = rows.mutable_data();
            {
              const py::gil_scoped_release unlocked;
              raise_if_error(self.pull(span, to));
            }
            return rows;
          },
          py::arg("keys"))
      .def(
          "push",
          [](TableAccess& self, const Keys& keys, const Rows& grads, float lr) {
            check_rows(keys, grads, self.table().dim, "grads");
            const auto span = span_of(keys);
            const py::gil_scoped_release unlocked;
            const PushOutcome outcome = self.push(span, grads.data(), lr);
            if (!outcome.status.is_ok()) raise_write_error(outcome.status, outcome.may_be_applied);
          },
          py::arg("keys"), py::arg("grads"), py::arg("lr"))
      .def(
          "assign",
          [](TableAccess& self, const Keys& keys, const Rows& rows) {
            check_rows(keys, rows, self.table().dim, "rows");
            const auto span = span_of(keys);
            const py::gil_scoped_release unlocked;
            raise_if_error(self.assign(span, rows.data()));
          },
          py::arg("keys"), py::arg("rows"))
      .def(
          "erase",
          [](TableAccess& self, const Keys& keys) {
            const auto span = span_of(keys);
            const py::gil_scoped_release unlocked;
            return value_or_raise(self.erase(span));
          },
          py::arg("keys"))
      .def(
          "scan",
          [](TableAccess& self, std::uint32_t shard, std::uint64_t cursor, std::uint32_t max_rows) {
            ScanPage page;
            {
              const py::gil_scoped_release unlocked;
              page = value_or_raise(self.scan(shard, cursor, max_rows));
            }
            const auto n = static_cast<py::ssize_t>(page.keys.size());
            return py::make_tuple(Keys(n, page.keys.data()),
                                  Rows({n, static_cast<py::ssize_t>(self.table().dim)}, page.rows.data()),
                                  page.next_cursor);
          },
          py::arg("shard"), py::arg("cursor"), py::arg("max_rows"));
}

}  // namespace

void bind_session(py::module_& module) {
  bind_planned_ids(module);
  py::class_<Session, std::shared_ptr<Session>>(module, "NativeSession")
      .def(py::init(&make_session), py::arg("shards"), py::kw_only(), py::arg("first_step"), py::arg("first_sequence"),
           py::arg("clocked"), py::arg("grad_sum"), py::arg("deadline_ms"), py::arg("cache_bytes") = 0,
           py::arg("cache_staleness") = 0, py::arg("cache_exact") = true, py::arg("cache_dtype") = "float32",
           py::arg("no_grad_bytes") = SessionOptions{}.no_grad_bytes, py::arg("no_grad_ms") = 0)
      .def(
          "bind",
          [](Session& self, std::string name, std::uint32_t table_id, std::uint32_t schema_version, std::uint32_t dim,
             std::uint64_t num_rows, float lr, bool cached, bool frozen) {
            raise_if_error(self.bind({std::move(name), table_id, schema_version, dim, num_rows, lr, cached, frozen}));
          },
          Unlocked(), py::arg("name"), py::kw_only(), py::arg("table_id"), py::arg("schema_version"), py::arg("dim"),
          py::arg("num_rows"), py::arg("lr"), py::arg("cached") = true, py::arg("frozen") = false)
      .def(
          "set_frozen",
          [](Session& self, const std::string& name, bool frozen) { raise_if_error(self.set_frozen(name, frozen)); },
          py::arg("name"), py::arg("frozen"))
      .def(
          "set_lr", [](Session& self, const std::string& name, float lr) { raise_if_error(self.set_lr(name, lr)); },
          py::arg("name"), py::arg("lr"))
      .def("start_trace", [](Session& self) { return self.state().start_trace(); })
      .def("record_pulls", [](Session& self) { self.state().record_pulls(); })
      .def("take_pull_spans",
           [](Session& self) {
             std::vector<std::array<std::int64_t, 4>> out;
             for (const PullSpan& span : self.state().take_pull_spans()) {
               out.push_back({span.begin_ns, span.end_ns, span.step, static_cast<std::int64_t>(span.thread)});
             }
             return out;
           })
      .def(
          "pull_merged",
          [](Session& self, const PlannedIds& plan, const py::sequence& roots, bool train, bool with_gradient) {
            const BatchTensors tensors(roots);
            const py::gil_scoped_release unlocked;
            const NoGradScope scope(!with_gradient);
            raise_if_error(pull_merged(self, plan, tensors.span(), train));
          },
          py::arg("plan"), py::arg("roots"), py::arg("train"), py::kw_only(), py::arg("with_gradient") = true)
      .def("count_missed", &Session::count_missed, py::arg("counts"))
      .def(
          "pack_merged",
          [](Session&, const PlannedIds& plan, const py::sequence& roots, bool train) {
            const BatchTensors tensors(roots);
            const py::gil_scoped_release unlocked;
            return pack_merged(plan, tensors.span(), train);
          },
          py::arg("plan"), py::arg("roots"), py::arg("train"))
      .def(
          "refuse_lookups", [](Session& self, const std::string& text) { self.state().refuse_lookups(text); },
          py::arg("text"))
      .def(
          "drop_gradients", [](Session& self) { raise_if_error(self.drop_gradients()); }, Unlocked())
      .def_property_readonly("is_closed", [](Session& self) { return self.state().closed(); })
      .def_property_readonly("lookup_refusal", [](Session& self) { return self.state().check_lookup().message(); })
      .def_property_readonly("rows_in_step", &Session::rows_in_step)
      .def("end_evaluation", &Session::end_evaluation, Unlocked())
      .def(
          "seal",
          [](Session& self, float scale, float clip_row_norm) {
            SealReport report;
            {
              const py::gil_scoped_release unlocked;
              report = value_or_raise(self.seal(scale, clip_row_norm));
            }
            return py::make_tuple(report.rows, report.nonfinite_rows, report.nonfinite_table, report.nonfinite_key);
          },
          py::arg("scale"), py::kw_only(), py::arg("clip_row_norm") = std::numeric_limits<float>::infinity())
      .def(
          "prepare", [](Session& self) { raise_if_error(self.prepare()); }, Unlocked())
      .def(
          "commit_prepared", [](Session& self) { raise_if_error(self.commit_prepared()); }, Unlocked())
      .def(
          "begin_commit", [](Session& self) { raise_if_error(self.begin_commit()); }, Unlocked())
      .def(
          "finish_commit", [](Session& self) { raise_if_error(self.finish_commit()); }, Unlocked())
      .def(
          "commit", [](Session& self) { raise_if_error(self.commit()); }, Unlocked())
      .def(
          "abort", [](Session& self) { raise_if_error(self.abort()); }, Unlocked())
      .def("reopen", &Session::reopen, Unlocked())
      .def("close", &Session::close, Unlocked())
      .def("check_usable", [](Session& self) { raise_if_error(self.state().check_usable()); })
      .def_property_readonly("shard_count", [](Session& self) { return self.state().shards().shard_count(); })
      .def(
          "skip_to", [](Session& self, std::int64_t step) { raise_if_error(self.skip_to(step)); }, py::arg("step"))
      .def_property_readonly("step", &Session::step)
      .def("count_staged", [](Session& self) { ++self.state().staged_calls; })
      .def_property_readonly("staged_calls", [](Session& self) { return self.state().staged_calls.load(); })
      .def_property_readonly("lookups_missed",
                             [](Session& self) { return self.state().counters.lookups_missed.load(); })
      .def_property_readonly("is_prepared", [](Session& self) { return self.state().phase.load() == Phase::kPrepared; })
      .def("stats", &stats_of);
  bind_table(module);
  bind_prefetcher(module);
}

}  // namespace sparserow::bindings

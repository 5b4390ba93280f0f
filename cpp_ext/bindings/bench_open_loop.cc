// The load of `sparserow bench sweeps`: pulls that come when they are due, whether earlier ones are done or not.
// Without Python, whose threads would wait for each other's bytecode.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "shared_arrays.h"
#include "shared_errors.h"
#include "store/store.h"
#include "store/table/lock_timer.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

using LoopClock = std::chrono::steady_clock;
using LoopSeconds = std::chrono::duration<double>;

constexpr std::chrono::microseconds kSpun{60};  // a sleep ends later by about as much

// One after another. Returns how long after it was due each was done.
std::vector<double> pull_when_due(const Store& store, std::uint32_t table_id, std::span<const std::uint64_t> keys,
                                  std::span<const double> due, float* out, Status& status) {
  std::vector<double> seconds;
  seconds.reserve(due.size());
  const std::size_t batch = due.empty() ? 0 : keys.size() / due.size();
  const auto begin = LoopClock::now();
  for (std::size_t i = 0; i < due.size() && status.is_ok(); ++i) {
    const auto at = begin + std::chrono::duration_cast<LoopClock::duration>(LoopSeconds(due[i]));
    std::this_thread::sleep_until(at - kSpun);
    while (LoopClock::now() < at) {
    }
    status = store.pull(table_id, keys.subspan(i * batch, batch), Dtype::kFloat32, reinterpret_cast<std::byte*>(out));
    seconds.push_back(LoopSeconds(LoopClock::now() - at).count());
  }
  return seconds;
}

py::array open_loop_pulls(const Store& store, std::uint32_t table_id, const py::array& keys,
                          const py::array_t<double, py::array::c_style>& due) {
  const auto wanted = keys_of(keys);
  const auto times = static_cast<std::size_t>(due.size());
  const auto schema = store.schema(table_id);
  if (!schema) raise_if_error({Code::kNotFound, "table id " + std::to_string(table_id) + " does not exist"});
  if (due.ndim() != 1 || times == 0 || wanted.size() % times != 0) {
    raise_if_error({Code::kInvalidArgument, "open_loop_pulls: keys (n * batch) and due (n), n > 0"});
  }
  std::vector<float> out(wanted.size() / times * schema->dim);
  Status status;
  std::vector<double> seconds;
  {
    const py::gil_scoped_release released;
    seconds = pull_when_due(store, table_id, wanted, {due.data(), times}, out.data(), status);
  }
  raise_if_error(status);
  const auto count = static_cast<py::ssize_t>(seconds.size());
  return array_of(std::move(seconds), {count});
}

// What a sweep costs by the CPU alone: a thread that works in slices as one, sleeps as one, and holds nothing.
py::dict spin_slices(double seconds, double slice_seconds, double pause_ratio) {
  if (!(seconds >= 0 && slice_seconds > 0 && pause_ratio >= 0)) {
    raise_if_error({Code::kInvalidArgument, "spin_slices: seconds and pause_ratio from 0, slice_seconds above 0"});
  }
  const py::gil_scoped_release released;
  LongestLock longest;
  const auto begin = LoopClock::now();
  do {
    const LockTimer clock;
    const auto start = LoopClock::now();
    while (LoopSeconds(LoopClock::now() - start).count() < slice_seconds) {
    }
    const LockTimes took = clock.elapsed();
    longest.note(took);
    std::this_thread::sleep_for(LoopSeconds(static_cast<double>(took.cpu_nanoseconds) * 1e-9 * pause_ratio));
  } while (LoopSeconds(LoopClock::now() - begin).count() < seconds);
  const py::gil_scoped_acquire gil;
  py::dict found;
  found["longest_seconds"] = static_cast<double>(longest.longest().wall_nanoseconds) * 1e-9;
  found["longest_cpu_seconds"] = static_cast<double>(longest.longest().cpu_nanoseconds) * 1e-9;
  return found;
}

}  // namespace

void bind_open_loop(py::module_& module) {
  module.def("open_loop_pulls", &open_loop_pulls, py::arg("store"), py::arg("table_id"), py::arg("keys"),
             py::arg("due"));
  module.def("spin_slices", &spin_slices, py::arg("seconds"), py::arg("slice_seconds"), py::arg("pause_ratio"));
}

}  // namespace sparserow::bindings

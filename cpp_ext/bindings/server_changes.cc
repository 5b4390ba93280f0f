// Following the changes of a Store, for Python: cursors and pages. Calls that touch rows run without the GIL.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <bit>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shared_arrays.h"
#include "shared_errors.h"
#include "store/changes/change_page.h"
#include "util/not_allowed.h"

namespace py = pybind11;

namespace sparserow::bindings {
namespace {

template <class Call>
auto without_gil(Call&& call) {
  const py::gil_scoped_release released;
  return call();
}

void open_cursor(Store& store, const std::string& name, const py::array& versions, std::vector<std::uint32_t> tables,
                 std::uint32_t idle_sec, std::uint32_t hold_updates, float hold_move, std::uint32_t hold_ms) {
  const auto numbers = keys_of(versions);
  ThresholdOptions threshold{.updates = hold_updates, .move = hold_move, .longest = std::chrono::milliseconds(hold_ms)};
  if (!(hold_move >= 0.0f) || threshold.is_on() != (hold_ms > 0)) {
    raise_if_error({Code::kInvalidArgument,
                    "cursor '" + name + "': hold_updates " + std::to_string(hold_updates) + ", hold_move " +
                        std::to_string(hold_move) + ", hold_ms " + std::to_string(hold_ms) +
                        " is not allowed; allowed: all 0, or hold_ms > 0 with hold_updates or hold_move > 0"});
  }
  raise_if_error(without_gil([&] {
    return store.changes().open(name, numbers, std::move(tables), std::chrono::seconds(idle_sec), threshold);
  }));
}

py::tuple read_page(Store& store, const std::string& name, std::uint32_t begin, std::uint64_t max_bytes) {
  ChangePage page = value_or_raise(without_gil([&] { return read_changes(store, name, begin, max_bytes); }));
  const auto size = static_cast<py::ssize_t>(page.bytes.size());
  return py::make_tuple(array_of(std::move(page.bytes), {size}, "uint8"), page.slots, page.next_begin, page.is_last);
}

using SlotNumbers = py::array_t<std::uint32_t, py::array::c_style>;

void ack_page(Store& store, const std::string& name, const py::array& slots, const py::array& versions,
              std::uint64_t part) {
  const auto until = keys_of(versions);
  if (!py::isinstance<SlotNumbers>(slots) || slots.ndim() != 1 ||
      static_cast<std::size_t>(slots.size()) != until.size()) {
    raise_if_error(must_be("slots", "a contiguous uint32 array as long as versions"));
  }
  const std::span passed(static_cast<const std::uint32_t*>(slots.data()), until.size());
  raise_if_error(without_gil([&] { return store.changes().ack(name, passed, until, part); }));
}

py::dict apply_page(Store& store, const py::buffer& page) {
  const py::buffer_info view = page.request();
  if (view.itemsize != 1 || view.ndim != 1 || view.strides[0] != 1) {
    raise_if_error(must_be("page", "contiguous bytes"));
  }
  const std::span bytes(static_cast<const std::byte*>(view.ptr), static_cast<std::size_t>(view.size));
  const auto applied = value_or_raise(without_gil([&] { return apply_changes(store, bytes); }));
  const auto count = static_cast<py::ssize_t>(applied.slots.size());
  SlotNumbers slots(count);
  py::array_t<std::uint64_t> versions(count);
  py::array_t<std::uint64_t> positions(count);
  SlotNumbers oldest(count);
  for (py::ssize_t i = 0; i < count; ++i) {
    const AppliedSlot& slot = applied.slots[static_cast<std::size_t>(i)];
    slots.mutable_at(i) = slot.slot;
    versions.mutable_at(i) = slot.version;
    positions.mutable_at(i) = slot.position;
    oldest.mutable_at(i) = slot.oldest_at_ms;
  }
  py::dict out;
  out["slots"] = slots;
  out["versions"] = versions;
  out["positions"] = positions;
  out["oldest_at_ms"] = oldest;
  out["part"] = applied.part;
  out["rows"] = applied.rows;
  out["unchanged"] = applied.unchanged;
  out["erased"] = applied.erased;
  out["tables"] = applied.has_whole_slots ? py::cast(applied.tables) : py::none();
  out["applied_tables"] = py::cast(applied.applied_tables);
  py::dict others;
  for (const auto& other : applied.others)
    others[py::int_(other.table_id)] = py::make_tuple(other.dim, other.schema_version);
  out["others"] = others;
  return out;
}

void assign_versions(Store& store, std::uint32_t table_id, const py::array& keys, const py::array& versions,
                     const py::array& rows) {
  const auto wanted = keys_of(keys);
  const auto numbers = keys_of(versions);
  const auto schema = store.schema(table_id);
  if (!schema) raise_if_error({Code::kNotFound, "table id " + std::to_string(table_id) + " does not exist"});
  if (numbers.size() != wanted.size()) {
    raise_if_error(must_be("versions", "as many as keys"));
  }
  const float* values = matrix_of(rows, "rows", wanted.size(), schema->dim);
  raise_if_error(without_gil([&] { return store.assign_versions(table_id, wanted, values, numbers.data()); }));
}

py::dict row_facts(Store& store, std::uint32_t table_id, std::uint64_t key) {
  const RowFacts facts = value_or_raise(without_gil([&] { return store.changes().facts(table_id, key); }));
  py::dict out;
  out["exists"] = facts.exists;
  out["is_in_memory"] = facts.is_in_memory;
  out["version"] = facts.version;
  out["update_count"] = facts.update_count;
  out["age_ms"] = facts.age_ms;
  return out;
}

py::dict change_stats(Store& store) {
  const ChangeLogStats stats = store.changes().stats();
  py::dict out;
  out["cursors"] = stats.cursors;
  out["used_bytes"] = stats.used_bytes;
  out["forgotten"] = stats.forgotten;
  out["scans"] = stats.scans;
  out["snapshots"] = stats.snapshots;
  out["held_rows"] = stats.waiting_rows;
  return out;
}

py::array_t<std::uint64_t> versions_of(Store& store) {
  const std::vector<std::uint64_t> versions = without_gil([&] { return store.changes().versions(); });
  return py::array_t<std::uint64_t>(static_cast<py::ssize_t>(versions.size()), versions.data());
}

}  // namespace

void bind_changes(py::module_& module) {
  py::reinterpret_borrow<py::class_<Store, std::shared_ptr<Store>>>(module.attr("Store"))
      .def("change_versions", &versions_of)
      .def("open_cursor", &open_cursor, py::arg("name"), py::arg("versions"), py::kw_only(),
           py::arg("tables") = std::vector<std::uint32_t>{}, py::arg("idle_sec") = 0, py::arg("hold_updates") = 0,
           py::arg("hold_move") = 0.0f, py::arg("hold_ms") = 0)
      .def(
          "close_cursor", [](Store& store, const std::string& name) { store.changes().close(name); }, py::arg("name"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "close_idle_cursors", [](Store& store) { store.changes().close_idle(); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "has_cursor", [](Store& store, const std::string& name) { return store.changes().is_open(name); },
          py::arg("name"))
      .def("change_signal", [](Store& store) { return value_or_raise(store.changes().signal().descriptor()); })
      .def("arm_change_signal", [](Store& store) { store.changes().signal().arm(); })
      .def("read_changes", &read_page, py::arg("name"), py::kw_only(), py::arg("begin") = 0, py::arg("max_bytes"))
      .def("ack_changes", &ack_page, py::arg("name"), py::arg("slots"), py::arg("versions"), py::arg("part") = 0)
      .def("apply_changes", &apply_page, py::arg("page"))
      .def("assign_versions", &assign_versions, py::arg("table_id"), py::arg("keys"), py::arg("versions"),
           py::arg("rows"))
      .def("row_facts", &row_facts, py::arg("table_id"), py::arg("key"))
      .def("change_stats", &change_stats);
  module.def(
      "slots_of",
      [](std::uint32_t table_id, const py::array& keys, std::uint32_t slot_count) {
        if (!std::has_single_bit(slot_count) || slot_count < 2 || slot_count > 65536) {
          raise_if_error(not_allowed("slot_count", slot_count, kSlotCounts));
        }
        const auto all = keys_of(keys);
        SlotNumbers slots(static_cast<py::ssize_t>(all.size()));
        std::uint32_t* out = slots.mutable_data();
        without_gil([&] {
          for (std::size_t i = 0; i < all.size(); ++i) out[i] = slot_of(row_hash(table_id, all[i]), slot_count);
        });
        return slots;
      },
      py::arg("table_id"), py::arg("keys"), py::arg("slot_count"));
  module.attr("NOT_FOLLOWED") = ChangeLog::kNotFollowed;
}

}  // namespace sparserow::bindings

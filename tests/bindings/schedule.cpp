// Schedules whose methods return the actions.
#include "plan/schedule.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

const char* name_of(ActionKind kind) {
  switch (kind) {
    case ActionKind::Unshard:
      return "unshard";
    case ActionKind::Reshard:
      return "reshard";
    case ActionKind::Reduce:
      return "reduce";
  }
  return "";
}

struct ScheduledExit {
  CallHandle call;
  Actions actions;
};

UnitMesh mesh_of(bool gathers, bool releases) {
  UnitMesh mesh;
  mesh.shards_optimizer = gathers;
  mesh.shards_parameters = releases;
  return mesh;
}

// A schedule whose methods return the actions.
struct PySchedule {
  PySchedule(int num_units, int prefetch, bool gathers, bool releases, Instructions order)
      : schedule(
            std::vector<UnitMesh>(num_units, mesh_of(gathers, releases)),
            {.prefetch = prefetch},
            std::move(order)) {}

  template <typename Call>
  Actions run(const Call& call) {
    call();
    return std::exchange(actions, {});
  }

  Schedule schedule;
  Actions actions;
};

} // namespace

void register_schedule(py::module_& module) {
  py::class_<CallHandle>(module, "CallHandle").def_readonly("unit", &CallHandle::unit);
  py::class_<Action>(module, "Action")
      .def_property_readonly("kind", [](const Action& action) { return name_of(action.kind); })
      .def_readonly("unit", &Action::unit);
  py::class_<ScheduledExit>(module, "ScheduledExit")
      .def_readonly("call", &ScheduledExit::call)
      .def_readonly("actions", &ScheduledExit::actions);
  using S = PySchedule;
  py::class_<S>(module, "Schedule")
      .def(
          py::init<int, int, bool, bool, Instructions>(),
          py::arg("num_units"),
          py::arg("prefetch"),
          py::arg("gathers"),
          py::arg("releases"),
          py::arg("order"))
      .def(
          "begin_pass",
          [](S& s, bool grad) { return s.run([&] { s.schedule.begin_pass(grad, s.actions); }); })
      .def(
          "enter",
          [](S& s, UnitId unit, bool grad) {
            return s.run([&] { s.schedule.enter(unit, grad, s.actions); });
          },
          py::arg("unit"),
          py::arg("grad") = true)
      .def(
          "exit",
          [](S& s, UnitId unit, bool needs_backward, bool reads) {
            const CallHandle call = s.schedule.exit(unit, needs_backward, reads, s.actions);
            return ScheduledExit{call, std::exchange(s.actions, {})};
          },
          py::arg("unit"),
          py::arg("needs_backward") = true,
          py::arg("reads") = true)
      .def("end_pass", [](S& s) { return s.run([&] { s.schedule.end_pass(s.actions); }); })
      .def(
          "is_expected",
          [](const S& s, UnitId unit) { return s.schedule.order().find(unit).has_value(); })
      .def("finish_order", [](S& s) { return s.run([&] { s.schedule.finish_order(s.actions); }); })
      .def(
          "serve",
          [](S& s, UnitId unit) { return s.run([&] { s.schedule.serve(unit, s.actions); }); })
      .def("leave_pass", [](S& s) { return s.run([&] { s.schedule.leave_pass(s.actions); }); })
      .def("changed", [](const S& s) { return s.schedule.order().changed(); })
      .def("hash", [](const S& s) { return s.schedule.order().hash(); })
      .def("open_calls", [](const S& s) { return s.schedule.open_calls(); })
      .def(
          "hear_open_calls",
          [](S& s, const std::vector<bool>& open) { s.schedule.hear_open_calls(open); })
      .def("needs", [](const S& s) { return s.schedule.order().needs(); })
      .def(
          "finish_pass",
          [](S& s, bool agreed, const std::vector<bool>& needs) {
            s.schedule.finish_pass(agreed, needs, s.schedule.reads_more());
          })
      .def("abort", [](S& s) { return s.run([&] { s.schedule.abort(s.actions); }); })
      .def("begin_backward", [](S& s) { s.schedule.begin_backward(); })
      .def(
          "set_reduced",
          [](S& s, UnitId unit, bool reduced) { s.schedule.set_reduced(unit, reduced); })
      .def(
          "pre_backward",
          [](S& s, const CallHandle& call) {
            return s.run([&] { s.schedule.pre_backward(call, s.actions); });
          })
      .def(
          "ready",
          [](S& s, UnitId unit) { return s.run([&] { s.schedule.ready(unit, s.actions); }); })
      .def("end_backward", [](S& s) { return s.run([&] { s.schedule.end_backward(s.actions); }); })
      .def(
          "invalidate",
          [](S& s, UnitId unit) { return s.run([&] { s.schedule.invalidate(unit, s.actions); }); })
      .def("is_resident", [](const S& s, UnitId unit) { return s.schedule.is_resident(unit); })
      .def_property_readonly("order", [](const S& s) { return s.schedule.expected(); });
}

} // namespace zerocore

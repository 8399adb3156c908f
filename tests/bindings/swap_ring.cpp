// The plan of units on a disk.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "plan/swap_ring.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

const char* name_of(SwapKind kind) {
  switch (kind) {
    case SwapKind::Read:
      return "read";
    case SwapKind::Write:
      return "write";
    case SwapKind::Await:
      return "await";
  }
  return "";
}

} // namespace

void register_swap_ring(py::module_& module) {
  py::class_<SwapStep>(module, "SwapStep")
      .def_property_readonly("kind", [](const SwapStep& step) { return name_of(step.kind); })
      .def_readonly("unit", &SwapStep::unit)
      .def_readonly("buffer", &SwapStep::buffer);
  const auto steps_of = [](const auto& call) {
    SwapSteps steps;
    call(steps);
    return steps;
  };
  py::class_<SwapRing>(module, "SwapRing")
      .def(
          py::init<const std::vector<int64_t>&, int, int64_t>(),
          py::arg("unit_nbytes"),
          py::arg("num_buffers"),
          py::arg("alignment"))
      .def_property_readonly("file_nbytes", &SwapRing::file_nbytes)
      .def_property_readonly("buffer_nbytes", &SwapRing::buffer_nbytes)
      .def_property_readonly("num_buffers", &SwapRing::num_buffers)
      .def("range", &SwapRing::range, py::arg("unit"))
      .def(
          "expect",
          [=](SwapRing& ring, std::vector<UnitId> order) {
            return steps_of([&](SwapSteps& steps) { ring.expect(std::move(order), steps); });
          },
          py::arg("order"))
      .def(
          "acquire",
          [](SwapRing& ring, UnitId unit) {
            SwapSteps steps;
            const int buffer = ring.acquire(unit, steps);
            return std::pair(buffer, steps);
          },
          py::arg("unit"))
      .def(
          "release",
          [=](SwapRing& ring, UnitId unit, bool changed) {
            return steps_of([&](SwapSteps& steps) { ring.release(unit, changed, steps); });
          },
          py::arg("unit"),
          py::arg("changed"))
      .def("finish", [=](SwapRing& ring) {
        return steps_of([&](SwapSteps& steps) { ring.finish(steps); });
      });
}

} // namespace zerocore

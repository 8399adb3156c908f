// Messages of all ranks, the links that they take, and sequences of collectives.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <utility>
#include <vector>

#include "plan/dissemination.h"
#include "testing.h"
#include "watch/control_link.h"
#include "watch/issue_guard.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// Combines the messages of all ranks of the group, on each of them.
ControlMessage exchange(const c10::intrusive_ptr<c10d::Backend>& backend, ControlMessage own) {
  const auto link = ControlLink::of(backend);
  return link->wait(link->begin(std::move(own)));
}

} // namespace

void register_dissemination(py::module_& module) {
  py::enum_<MessageKind>(module, "MessageKind")
      .value("Pass", MessageKind::Pass)
      .value("AnyFlags", MessageKind::AnyFlags)
      .value("Collective", MessageKind::Collective)
      .value("Lists", MessageKind::Lists)
      .value("Different", MessageKind::Different);
  py::class_<ControlMessage>(module, "ControlMessage")
      .def(
          py::init([](MessageKind kind, std::vector<int64_t> words) {
            return ControlMessage::of(kind, std::move(words));
          }),
          py::arg("kind"),
          py::arg("words"))
      .def_static(
          "of_flags",
          [](const std::vector<bool>& flags) {
            return ControlMessage::of_flags(MessageKind::AnyFlags, flags);
          },
          py::arg("flags"))
      .def("add_flags", &ControlMessage::add_flags, py::arg("flags"))
      .def("flags", &ControlMessage::flags, py::arg("count"), py::arg("first") = 0)
      .def_readonly("kind", &ControlMessage::kind)
      .def_readonly("words", &ControlMessage::words);
  py::class_<Dissemination>(module, "Dissemination")
      .def(
          py::init<int64_t, int64_t, ControlMessage>(),
          py::arg("rank"),
          py::arg("size"),
          py::arg("own"))
      .def_static("num_hops", &Dissemination::num_hops, py::arg("size"))
      .def_static("peers", &Dissemination::peers, py::arg("rank"), py::arg("size"))
      .def_static(
          "connections",
          [](int64_t rank, int64_t size) {
            std::vector<std::pair<int, bool>> result;
            for (const auto& [hop, sends] : Dissemination::connections(rank, size)) {
              result.emplace_back(hop, sends);
            }
            return result;
          },
          py::arg("rank"),
          py::arg("size"))
      .def("to", &Dissemination::to, py::arg("hop"))
      .def("source", &Dissemination::from, py::arg("hop"))
      .def("hop", &Dissemination::hop)
      .def("is_done", &Dissemination::is_done)
      .def("heard", &Dissemination::heard)
      .def("hear", &Dissemination::hear, py::arg("message"));
  py::class_<KnownSequence>(module, "KnownSequence")
      .def(py::init<>())
      .def("advance", &KnownSequence::advance, py::arg("collective"));
  module.def(
      "exchange",
      &exchange,
      py::arg("backend"),
      py::arg("own"),
      py::call_guard<py::gil_scoped_release>());
}

} // namespace zerocore

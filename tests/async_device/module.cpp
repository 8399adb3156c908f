// The device's functions for tests, in Python.
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "allocator.h"
#include "generator.h"
#include "group.h"
#include "link_timer.h"
#include "operator_loops.h"
#include "queue.h"
#include "registration.h"

namespace py = pybind11;

namespace async_device {

namespace {

void set_delays_of_all(uint64_t seed, double share, int longest_us) {
  set_delays({seed, share, longest_us});
}

std::vector<std::pair<int, int>> end_noted_waits() {
  std::vector<std::pair<int, int>> waits;
  for (const Wait& wait : end_waits()) {
    waits.emplace_back(wait.waiter, wait.source);
  }
  return waits;
}

int id_of_handle(intptr_t handle) {
  return reinterpret_cast<Queue*>(handle)->id;
}

void sleep(int us, int stream) {
  queue(stream).push(
      [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); }, /*delayed=*/false);
}

std::vector<std::pair<int, std::string>> in_python(const std::vector<Launch>& launches) {
  std::vector<std::pair<int, std::string>> result;
  for (const Launch& launch : launches) {
    result.emplace_back(launch.communicator, launch.what);
  }
  return result;
}

// Returns the launches whose tensors lie in registered memory, or the others.
std::vector<std::string> launches_by_memory(bool is_registered) {
  std::vector<std::string> result;
  for (const Launch& launch : issued_launches()) {
    if (launch.is_registered == is_registered) {
      result.push_back(launch.what);
    }
  }
  return result;
}

// Holds back the stream's later tasks until the gate is opened.
PointPtr hold(int stream) {
  auto gate = std::make_shared<Point>(-1);
  queue(stream).push([gate] { gate->wait(); }, /*delayed=*/false);
  return gate;
}

void bind_recording(py::module_& module) {
  py::class_<Recording, std::shared_ptr<Recording>>(module, "Recording")
      .def("__len__", [](const Recording& self) { return self.tasks.size(); })
      .def("replay", [](const Recording& self) {
        std::for_each(self.tasks.begin(), self.tasks.end(), &launch);
      });
  module.def("begin_recording", &begin_recording);
  module.def("end_recording", &end_recording);
}

// Binds the tables of functions that the device lends to zerocore.
void bind_tables(py::module_& module) {
  module.def("device_timer", [] { return py::capsule(static_cast<const void*>(&link_timer())); });
  module.def("loops", [] { return py::capsule(static_cast<const void*>(&operator_loops())); });
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  module.def("current_stream", &current_stream);
  module.def("id_of_handle", &id_of_handle);
  module.def("synchronize", &wait_for_device, no_gil);
  module.def("sleep", &sleep, py::arg("us"), py::arg("stream"));
  module.def(
      "set_delays", &set_delays_of_all, py::arg("seed"), py::arg("share"), py::arg("longest_us"));
  module.def("set_lag", [](int stream, int us) { queue(stream).set_lag(us); });
  py::class_<Point, PointPtr>(module, "Gate").def("open", &Point::reach);
  module.def("hold", &hold, py::arg("stream"));
  module.def("wait_for_stream", &wait_for_stream, py::arg("stream"), no_gil);
  module.def("begin_launches", &begin_launches);
  module.def("issued_launches", [] { return in_python(issued_launches()); });
  module.def("finished_launches", [] { return in_python(finished_launches()); });
  module.def("launches_by_memory", &launches_by_memory, py::kw_only(), py::arg("registered"));
  module.def("registrations", [] {
    const Registrations found = registrations();
    return py::make_tuple(found.num_allocations, found.num_windows, found.nbytes);
  });
  module.def("refuse_registration", &refuse_registration, py::arg("why"));
  module.def("booked", &booked_durations);
  bind_recording(module);
  bind_tables(module);
  module.def("set_capturing", [](int stream) { capturing_stream() = stream; });
  module.def("host_waits", &host_waits);
  module.def("forbid_host_waits", &forbid_host_waits);
  module.def("begin_waits", &begin_waits, py::arg("dropped"), py::arg("dropped_of_host") = -1);
  module.def("end_waits", &end_noted_waits);
  module.def(
      "num_device_allocations", [] { return allocator().getDeviceStats(0).num_device_alloc; });
  module.def("manual_seed", [](uint64_t seed) {
    at::Generator generator = default_generator();
    generator.set_current_seed(seed);
  });
  py::class_<AsyncGroup, c10d::Backend, c10::intrusive_ptr<AsyncGroup>>(module, "AsyncGroup")
      .def(py::init([](const c10::intrusive_ptr<c10d::Backend>& wire) {
        return c10::make_intrusive<AsyncGroup>(wire);
      }));
}

} // namespace async_device

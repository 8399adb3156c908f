// Python bindings of the runtime: statistics of allocators and pools, the watchdog, and the host's
// threads and memory.
#include <c10/core/CachingDeviceAllocator.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "comm/control_channel.h"
#include "device/stream.h"
#include "engine/offload/step_worker.h"
#include "memory/host_memory.h"
#include "memory/registered_memory.h"
#include "plan/pool_map.h"
#include "watch/alarm.h"
#include "watch/outside_ledger.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// A context manager around a collective that no engine issues, see Note [Outside collectives].
class Waiting {
 public:
  // `what` is for the alarm's text. `key` is equal on all ranks that issue the collective; if it is
  // empty, they do not compare it.
  Waiting(std::string what, std::string key, std::string group)
      : what_(std::move(what)), key_(std::move(key)), group_(std::move(group)) {}

  void enter() {
    const py::gil_scoped_release released;
    alarm_ = Watchdog::of_process().alarm_of(group_);
    token_ = alarm_ == nullptr ? 0 : alarm_->enter(what_);
    try {
      OutsideLedger::of_process().begin(group_, key_);
    } catch (const std::exception& error) {
      fail(message_of(error));
      throw;
    }
  }
  void leave(const py::object& error) {
    if (PyObject_IsInstance(error.ptr(), PyExc_RuntimeError) == 1) { // c10d raises these
      const std::string text = py::str(error);
      const py::gil_scoped_release released;
      fail(text);
    }
    end();
  }

 private:
  void fail(const std::string& error) {
    if (alarm_ != nullptr) {
      alarm_->fail(what_ + " failed: " + error);
    }
    end();
  }
  void end() {
    OutsideLedger::of_process().end(group_);
    if (alarm_ != nullptr) {
      alarm_->leave(token_);
    }
  }

  const std::string what_, key_, group_;
  std::shared_ptr<Alarm> alarm_;
  int64_t token_ = 0;
};

// How often torch's allocator has called a device's own allocator in this process.
struct AllocatorCounts {
  int64_t num_retries = 0; // retries after it had freed its cache, because memory was short
  int64_t num_device_allocations = 0; // calls to the device's own allocator, such as cudaMalloc
};

// Returns nullopt on the CPU, on devices without statistics, and with a plugged-in allocator.
std::optional<AllocatorCounts> allocator_counts(const std::string& name) {
  const c10::Device device(name);
  if (device.is_cpu()) {
    return std::nullopt;
  }
  try {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return AllocatorCounts{stats.num_alloc_retries, stats.num_device_alloc};
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

void register_watchdog(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def(
      "note_end",
      [](const std::string& how) { Watchdog::of_process().note_end(how); },
      py::arg("how"),
      Released());
  module.def("connect_control", &connect_peers, py::arg("group"), Released());
  module.def(
      "watch_group",
      [](const std::string& group, const std::string& beside) {
        Watchdog::of_process().add_group(group, beside);
      },
      py::arg("group"),
      py::kw_only(),
      py::arg("beside"),
      Released());
  module.def("check_not_capturing", &check_not_capturing);
  py::class_<Waiting>(module, "Waiting")
      .def(
          py::init<std::string, std::string, std::string>(),
          py::arg("what"),
          py::arg("key"),
          py::arg("group"))
      .def("__enter__", &Waiting::enter)
      .def(
          "__exit__",
          [](Waiting& self, const py::object&, const py::object& error, const py::object&) {
            self.leave(error);
          });
}

void register_host(py::module_& module) {
  module.def("use_host_threads", &use_host_threads, py::arg("num_threads"));
  py::class_<HostMemory, std::shared_ptr<HostMemory>>(module, "HostMemory")
      .def(
          py::init([](int64_t nbytes, int64_t pinned_nbytes, bool inherited) {
            return HostMemory::map({nbytes, pinned_nbytes, inherited});
          }),
          py::arg("nbytes"),
          py::kw_only(),
          py::arg("pinned_nbytes") = 0,
          py::arg("inherited") = false)
      .def("view", &HostMemory::view, py::arg("offset"), py::arg("numel"), py::arg("dtype"))
      .def_property_readonly("nbytes", &HostMemory::nbytes)
      .def_property_readonly("pinned_nbytes", &HostMemory::pinned_nbytes)
      .def_property_readonly("address", [](const HostMemory& memory) {
        return reinterpret_cast<uintptr_t>(memory.data());
      });
}

} // namespace

void register_runtime(py::module_& module) {
  register_host(module);
  register_watchdog(module);
  py::class_<AllocatorCounts>(module, "AllocatorCounts")
      .def_readonly("num_retries", &AllocatorCounts::num_retries)
      .def_readonly("num_device_allocations", &AllocatorCounts::num_device_allocations);
  module.def("allocator_counts", &allocator_counts, py::arg("device"));
  py::class_<RegisteredStats>(module, "RegisteredStats")
      .def_readonly("backend", &RegisteredStats::backend)
      .def_readonly("is_offered", &RegisteredStats::is_offered)
      .def_readonly("num_windows", &RegisteredStats::num_windows)
      .def_readonly("nbytes", &RegisteredStats::nbytes);
  py::class_<PoolStats>(module, "PoolStats")
      .def_readonly("in_use_nbytes", &PoolStats::in_use_nbytes)
      .def_readonly("peak_nbytes", &PoolStats::peak_nbytes)
      .def_readonly("recent_peak_nbytes", &PoolStats::recent_peak_nbytes)
      .def_readonly("reserved_nbytes", &PoolStats::reserved_nbytes)
      .def_readonly("peak_reserved_nbytes", &PoolStats::peak_reserved_nbytes)
      .def_readonly("num_allocations", &PoolStats::num_allocations);
}

} // namespace zerocore

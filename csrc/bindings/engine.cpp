// Python bindings of the engine.
#include <ATen/core/functional.h>
#include <pybind11/functional.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/py_engine.h"
#include "engine/engine.h"
#include "engine/graph/autograd.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// Returns the values in a tuple, list, dict or dataclass; nothing for other objects.
std::vector<py::object> values_in(const py::object& container) {
  std::vector<py::object> values;
  PyObject* object = container.ptr();
  if (PyTuple_Check(object) || PyList_Check(object)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(object); ++i) {
      values.push_back(py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(object, i)));
    }
  } else if (PyDict_Check(object)) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(object, &position, &key, &value) != 0) {
      values.push_back(py::reinterpret_borrow<py::object>(value));
    }
  } else if (py::hasattr(container, "__dataclass_fields__")) {
    if (py::hasattr(container, "__dict__")) {
      return {container.attr("__dict__")};
    }
    for (const py::handle name : container.attr("__dataclass_fields__")) { // it has slots
      values.push_back(py::getattr(container, name, py::none()));
    }
  }
  return values;
}

// Returns the tensors that require grad in nested tuples, lists, dicts and dataclasses. A container
// may contain itself.
std::vector<at::Tensor> collect_outputs(const py::object& value) {
  std::vector<at::Tensor> outputs;
  std::vector<py::object> rest{value};
  std::unordered_set<PyObject*> seen;
  while (!rest.empty()) {
    const py::object next = std::move(rest.back());
    rest.pop_back();
    if (THPVariable_Check(next.ptr())) {
      const at::Tensor& tensor = THPVariable_Unpack(next.ptr());
      if (tensor.requires_grad()) {
        outputs.push_back(tensor);
      }
    } else if (!next.is_none() && seen.insert(next.ptr()).second) {
      std::vector<py::object> inner = values_in(next);
      std::move(inner.rbegin(), inner.rend(), std::back_inserter(rest)); // the first value is next
    }
  }
  return outputs;
}

// Deletes the engine without the GIL: it waits for collectives and threads, which may need the GIL.
// A thread outside of Python has no GIL to release.
void end_without_gil(Engine* engine) {
  std::optional<py::gil_scoped_release> released;
  if (PyGILState_Check() != 0) {
    released.emplace();
  }
  delete engine;
}

PyEngine make_engine(
    const EngineOptions& options,
    const at::Device& device,
    std::vector<UnitSpec> units,
    Instructions order) {
  auto registrar = std::make_shared<Registrar>(units.size());
  // The constructor communicates, and a gloo thread that ends a program's collective may need the
  // GIL.
  const py::gil_scoped_release released;
  auto made = std::make_unique<Engine>(
      options, device, std::move(units), std::move(order), [registrar](UnitId unit, bool full) {
        registrar->show(unit, full);
      });
  std::shared_ptr<Engine> engine(made.release(), &end_without_gil);
  return {std::move(engine), std::move(registrar)};
}

void bind_param(
    PyEngine& self,
    UnitId unit,
    int index,
    const py::object& full,
    const py::object& shard,
    const py::object& grad,
    std::optional<at::Tensor> local,
    bool is_seen,
    bool is_whole) {
  Unit& owner = self.engine->unit(unit);
  owner.bind(
      index,
      THPVariable_Unpack(full.ptr()),
      THPVariable_Unpack(shard.ptr()),
      local.value_or(at::Tensor()));
  if (!grad.is_none()) {
    self.engine->reducer().views().bind(unit, index, THPVariable_Unpack(grad.ptr()));
  }
  owner.params().at(index).is_whole = is_whole;
  self.registrar->bind(unit, {is_seen && !is_whole ? shard : py::object(), full});
}

py::dict counters(PyEngine& self) {
  py::dict result;
  const OpCounters& counters = self.engine->trace().counters();
  for (int op = 0; op < kNumTraceOps; ++op) {
    result[trace_op_name(static_cast<TraceOp>(op))] = counters[op];
  }
  return result;
}

py::dict agreed(const PyEngine& self) {
  const Agreed counts = self.engine->agreed();
  return py::dict(
      py::arg("num_calls") = counts.num_calls,
      py::arg("num_shapes") = counts.num_shapes,
      py::arg("num_points") = counts.num_points,
      py::arg("num_compared") = counts.num_compared,
      py::arg("num_messages") = counts.num_messages);
}

// Binds a method of Unit; Python passes the unit's number first.
template <typename Result, typename... Args>
auto of_unit(Result (Unit::*called)(Args...) const) {
  return [called](PyEngine& self, UnitId unit, Args... args) -> Result {
    return (self.engine->unit(unit).*called)(args...);
  };
}

void register_setup(py::class_<PyEngine>& engine) {
  engine
      .def(
          py::init(&make_engine),
          py::arg("options"),
          py::kw_only(),
          py::arg("device"),
          py::arg("units"),
          py::arg("order"))
      .def("make_full", of_unit(&Unit::make_full))
      .def("make_shard", of_unit(&Unit::make_shard))
      .def("make_model_shard", of_unit(&Unit::make_model_shard))
      .def("holds_values", of_unit(&Unit::holds_values))
      .def(
          "spec",
          [](PyEngine& self, UnitId unit, int i) -> ParamSpec {
            return self.engine->unit(unit).params().at(i).spec;
          })
      .def("make_grad", method(&Reducer::make_grad))
      .def("bind_grad", method(&GradViews::bind))
      .def("make_sums", method(&Reducer::make_sums))
      .def("bind_sums", method(&GradViews::bind_sums))
      .def("has_sums", method(&Reducer::has_sums))
      .def_property_readonly("shows_sums", method(&GradViews::shows_sums))
      .def(
          "materialize",
          [](PyEngine& self,
             UnitId unit,
             const std::vector<std::optional<at::Tensor>>& full,
             bool broadcast) {
            const py::gil_scoped_release no_gil;
            const auto values =
                c10::fmap(full, [](const auto& value) { return value.value_or(at::Tensor()); });
            self.engine->materialize(unit, values, broadcast);
          })
      .def("follow", [](PyEngine& self, UnitId unit) { self.engine->unit(unit).follow_whole(); })
      .def("full_values", method(&Engine::full_values), py::call_guard<py::gil_scoped_release>())
      .def(
          "bind",
          &bind_param,
          py::arg("unit"),
          py::arg("param"),
          py::arg("full"),
          py::arg("shard"),
          py::arg("grad"),
          py::arg("local") = py::none(),
          py::arg("is_seen") = true,
          py::arg("is_whole") = false)
      .def("set_view", method(&Registrar::set_view))
      .def("start", method(&Engine::start));
}

void register_steps(py::class_<PyEngine>& engine) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  engine.def("begin_pass", method(&ModelCalls::begin_pass), no_gil)
      .def("fail_pass", method(&ModelCalls::fail_pass), no_gil)
      .def(
          "end_pass",
          [](PyEngine& self, const py::object& value) {
            const auto outputs = collect_outputs(value);
            const py::gil_scoped_release release;
            self.engine->calls().end_pass(outputs);
          })
      .def("enter", method(&ModelCalls::enter), no_gil)
      .def(
          "exit",
          [](PyEngine& self, UnitId unit, const py::object& value, bool keep, bool reads) {
            const auto outputs = collect_outputs(value);
            const py::gil_scoped_release release;
            self.engine->calls().exit(unit, outputs, keep, reads);
          },
          py::arg("unit"),
          py::arg("value"),
          py::arg("keep") = false,
          py::arg("reads") = true)
      .def("adopt", method(&ModelCalls::adopt), no_gil)
      .def_property_readonly(
          "in_call",
          [](PyEngine& self) {
            return self.engine->calls().in_call() && !self.engine->lifecycle().is_hiding();
          })
      .def("hold_unsharded", method(&Engine::hold_unsharded), no_gil)
      .def("release_unsharded", method(&Engine::release_unsharded), no_gil)
      .def("begin_hold", method(&Engine::begin_hold), no_gil)
      .def("set_hiding", method(&UnitLifecycle::set_hiding), no_gil)
      .def("wait_held", method(&Engine::wait_held), no_gil)
      .def("set_recycling", method(&BucketPool::set_recycling))
      .def("set_parked", method(&Engine::set_parked), no_gil)
      .def("device_memory", method(&Engine::device_memory))
      .def("take_memory", method(&Engine::take_memory))
      .def(
          "begin_update", method(&Engine::begin_update), py::arg("units"), py::arg("casts"), no_gil)
      .def("end_update", method(&Engine::end_update), py::arg("units"), py::arg("casts"), no_gil)
      .def("finish_gathers", method(&Engine::finish_gathers), no_gil)
      .def("finalize_backward", method(&ModelCalls::finalize_backward), no_gil)
      .def("begin_deferred", method(&Engine::begin_deferred), no_gil)
      .def("end_deferred", method(&Engine::end_deferred), py::arg("drops"), no_gil)
      .def_property("defers_reductions", method(&Reducer::deferred), method(&Reducer::set_deferred))
      .def_property_readonly("holds_back", method(&Reducer::holds_back_any))
      .def_property_readonly(
          "takes_notes",
          [](const PyEngine& self) { return self.engine->lifecycle().writes().takes_notes(); })
      .def(
          "note_write",
          [](PyEngine& self, UnitId unit, size_t param, int64_t number) {
            self.engine->lifecycle().writes().note(unit, param, number);
          })
      .def("any_rank", method(&Engine::any_rank), no_gil)
      .def(
          "exchange",
          [](PyEngine& self,
             size_t mesh,
             bool across,
             const at::Tensor& sent,
             std::vector<int64_t> sent_nbytes,
             std::vector<int64_t> received_nbytes,
             int64_t total_nbytes) {
            const py::gil_scoped_release release;
            MessageSizes sizes{std::move(sent_nbytes), std::move(received_nbytes), total_nbytes};
            return self.engine->exchange(mesh, across, sent, std::move(sizes));
          },
          py::keep_alive<0, 1>(), // the exchange uses the engine
          py::arg("mesh"),
          py::arg("across"),
          py::arg("sent"),
          py::arg("sent_nbytes"),
          py::arg("received_nbytes"),
          py::arg("total_nbytes"))
      .def("reset", method(&ModelCalls::reset), no_gil)
      .def("fail_backward", method(&ModelCalls::fail_backward), no_gil)
      .def_property_readonly("in_backward_pass", method(&UnitLifecycle::in_backward_pass))
      .def("mark_forked", method(&Engine::mark_forked))
      .def("check_process", method(&Engine::check_process))
      .def_property("sync", method(&Reducer::sync), method(&Reducer::set_sync));
}

// Binds per-unit settings, for FSDP2's interface.
void register_unit_controls(py::module_& module, py::class_<PyEngine>& engine) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<UnitSettings>(module, "UnitSettings")
      .def_readwrite("gradient_scale", &UnitSettings::gradient_scale)
      .def_readwrite("syncs", &UnitSettings::syncs)
      .def_readwrite("gather", &UnitSettings::gather)
      .def_readwrite("reduce", &UnitSettings::reduce)
      .def_readwrite("after_reduce", &UnitSettings::after_reduce);
  engine
      .def(
          "settings",
          [](PyEngine& self, UnitId unit) { return &self.engine->unit(unit).settings(); },
          py::return_value_policy::reference_internal)
      .def("unshard", method(&Engine::unshard), no_gil)
      .def("reshard", method(&Engine::reshard), no_gil)
      .def("show", method(&UnitLifecycle::use), no_gil)
      .def(
          "set_staying",
          [](PyEngine& self, UnitId unit, bool after_forward, bool after_backward) {
            self.engine->set_staying(unit, {after_forward, after_backward});
          },
          py::arg("unit"),
          py::kw_only(),
          py::arg("after_forward"),
          py::arg("after_backward"));
}

// Binds functions for states on the host or on disk.
void register_offload(py::class_<PyEngine>& engine) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  engine.def("is_updated_on_host", method(&Offload::updates))
      .def("update_on_host", method(&Offload::update), no_gil)
      .def("send_weights", method(&Offload::send), no_gil)
      .def("known_squares", method(&Offload::known_squares), no_gil)
      .def("arrived_gradient", method(&Offload::arrived_gradient), no_gil)
      .def("synchronize", method(&Offload::synchronize), no_gil)
      .def("make_moments", method(&Offload::make_moments), no_gil)
      .def_property_readonly("lands_gradients", method(&Offload::lands_gradients))
      .def_property_readonly("host_bytes", method(&Offload::host_bytes))
      .def("map_host_memory", method(&Offload::map_host_memory), no_gil)
      .def_property_readonly(
          "host_memory_nbytes",
          [](const PyEngine& self) {
            const HostStates* host = self.engine->offload().host_states();
            return host == nullptr ? 0 : host->layout().nbytes();
          })
      .def_property_readonly(
          "host_memory",
          [](const PyEngine& self) {
            const HostStates* host = self.engine->offload().host_states();
            return host == nullptr ? nullptr : host->mapped();
          })
      .def("open_disk", method(&Offload::open_disk), py::arg("folder"), py::arg("name"), no_gil);
}

int64_t sum_of_units(const PyEngine& self, int64_t (*nbytes_of)(const Unit&)) {
  int64_t nbytes = 0;
  for (const auto& unit : self.engine->units()) {
    nbytes += nbytes_of(*unit);
  }
  return nbytes;
}

void register_figures(py::class_<PyEngine>& engine) {
  engine.def("layout", of_unit(&Unit::layout))
      .def(
          "releases",
          [](PyEngine& self, UnitId unit) {
            return self.engine->unit(unit).context().mesh.shards_parameters;
          })
      .def(
          "param_version",
          [](PyEngine& self, UnitId unit, size_t param) {
            return self.engine->unit(unit).versions().of_param(param);
          })
      .def(
          "shards_version",
          [](PyEngine& self, UnitId unit) {
            return self.engine->unit(unit).versions().of_shards();
          })
      .def_property_readonly(
          "order", [](const PyEngine& self) { return self.engine->schedule().expected(); })
      .def_property_readonly(
          "pool_stats", [](const PyEngine& self) { return self.engine->pool().stats(); })
      .def("forget_recent_peak", method(&BucketPool::forget_recent_peak))
      .def_property_readonly(
          "parameter_nbytes",
          [](PyEngine& self) {
            return sum_of_units(self, [](const Unit& unit) { return unit.persistent_nbytes(); });
          })
      .def_property_readonly(
          "main_nbytes",
          [](PyEngine& self) {
            return sum_of_units(self, [](const Unit& unit) { return unit.main().device_nbytes(); });
          })
      .def_property_readonly("gradient_nbytes", method(&Reducer::persistent_nbytes))
      .def_property_readonly("registered", method(&Engine::registered))
      .def_property_readonly(
          "hand_overs", [](const PyEngine& self) { return self.engine->hand_overs(); })
      .def(
          "stream_handle",
          [](const PyEngine& self, const std::string& role) {
            const StreamRole found = stream_role_named(role);
            return reinterpret_cast<uintptr_t>(self.engine->streams().native_handle(found));
          })
      .def("start_trace", method(&Trace::start), py::arg("align") = true)
      .def("pause_trace", method(&Trace::pause))
      .def("stop_trace", method(&Trace::stop))
      .def_property_readonly("agreed", &agreed)
      .def_property_readonly("counters", &counters);
}

} // namespace

void register_engine(py::module_& module) {
  py::class_<PyEngine> engine(module, "Engine");
  py::class_<Exchange>(module, "Exchange")
      .def("wait", &Exchange::wait, py::call_guard<py::gil_scoped_release>());
  module.def("note_backward_call", [](const py::object& roots) {
    note_backward_call(collect_outputs(roots));
  });
  module.def("forget_backward_call", &forget_backward_call);
  register_setup(engine);
  register_steps(engine);
  register_unit_controls(module, engine);
  register_offload(engine);
  register_figures(engine);
}

} // namespace zerocore

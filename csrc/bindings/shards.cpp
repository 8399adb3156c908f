// Python bindings for sharded parameters: `grad`, memory, hooks, and names in modules.
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/exchange.h"
#include "engine/graph/autograd.h"
#include "engine/unit/unit_param.h"
#include "memory/bucket.h"

namespace zerocore {
namespace {

PyObject* get_grad(PyObject* param, void* /*closure*/) {
  return THPVariable_Wrap(THPVariable_Unpack(param).grad());
}

// Returns the reference count of a tensor's object while a caller looks at it and only C++ holds
// the tensor. It depends on torch's version.
Py_ssize_t references_of_unheld() {
  const at::Tensor tensor = at::empty({0});
  const at::Tensor second = tensor; // NOLINT(performance-unnecessary-copy-initialization)
  Py_DECREF(THPVariable_Wrap(tensor));
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(tensor));
  return Py_REFCNT(object.ptr());
}

// Assigns `param.grad`; the value is null for `del param.grad`. If the program holds the old
// gradient, the gradient keeps its values, which the next backward would overwrite.
int set_grad(PyObject* param, PyObject* value, void* /*closure*/) {
  static const Py_ssize_t unheld = references_of_unheld();
  const at::Tensor old = THPVariable_Unpack(param).grad();
  const auto object = pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(old));
  if (old.defined() && object.ptr() != value && Py_REFCNT(object.ptr()) > unheld) {
    PyObject* kept = PyObject_CallMethod(param, "_keep_grad", "O", object.ptr());
    Py_XDECREF(kept);
    if (kept == nullptr) {
      return -1;
    }
  }
  if (value == nullptr || value == Py_None) {
    THPVariable_Unpack(param).mutable_grad().reset();
    return 0;
  }
  PyObject* result = PyObject_CallMethod(param, "_assign_grad", "O", value);
  Py_XDECREF(result);
  return result == nullptr ? -1 : 0;
}

// Defines `grad` like torch's own attribute, which would call the class's __torch_function__ each
// time.
void define_grad(const pybind11::type& type) {
  static PyGetSetDef definition{"grad", get_grad, set_grad, nullptr, nullptr};
  auto attribute = pybind11::reinterpret_steal<pybind11::object>(
      PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
  if (!attribute) {
    throw pybind11::error_already_set();
  }
  pybind11::setattr(type, "grad", attribute);
}

// Assigns a gradient that may be on another device, which torch would refuse.
void show_grad(const at::Tensor& param, const at::Tensor& grad) {
  param.mutable_grad() = grad;
}

// Makes the tensors that share the storage of `window` use `memory`, and keeps it alive.
void move_window(const at::Tensor& window, const at::Tensor& memory) {
  TORCH_CHECK_VALUE(window.nbytes() == memory.nbytes(), "a window must keep its size");
  auto owner = std::make_shared<c10::Storage>(memory.storage());
  give_memory(window, kept_memory(owner, memory.mutable_data_ptr(), memory.device()));
}

// Returns whether two dicts have the same objects in the same order. Every optimizer step asks.
bool same_objects(const pybind11::dict& first, const pybind11::dict& second) {
  Py_ssize_t at = 0, other_at = 0;
  PyObject *key = nullptr, *value = nullptr, *other_key = nullptr, *other = nullptr;
  if (first.size() != second.size()) {
    return false;
  }
  while (PyDict_Next(first.ptr(), &at, &key, &value) != 0 &&
         PyDict_Next(second.ptr(), &other_at, &other_key, &other) != 0) {
    const bool are_dicts = PyDict_Check(value) && PyDict_Check(other);
    const bool are_same = are_dicts ? same_objects(
                                          pybind11::reinterpret_borrow<pybind11::dict>(value),
                                          pybind11::reinterpret_borrow<pybind11::dict>(other))
                                    : value == other;
    if (!are_same) {
      return false;
    }
  }
  return true;
}

// Replaces the first object of each pair by the second in all modules. It touches no other object:
// in a forked process each counted reference copies memory.
void replace_in_modules(
    const std::vector<std::pair<pybind11::object, pybind11::object>>& replaced) {
  const pybind11::dict modules = pybind11::module_::import("sys").attr("modules");
  Py_ssize_t at = 0;
  PyObject *module_name = nullptr, *module = nullptr;
  while (PyDict_Next(modules.ptr(), &at, &module_name, &module) != 0) {
    if (PyModule_Check(module) == 0) {
      continue;
    }
    PyObject* names = PyModule_GetDict(module);
    Py_ssize_t place = 0;
    PyObject *name = nullptr, *value = nullptr;
    while (PyDict_Next(names, &place, &name, &value) != 0) {
      const auto pair = std::ranges::find_if(
          replaced, [&](const auto& each) { return each.first.ptr() == value; });
      if (pair != replaced.end() && PyDict_SetItem(names, name, pair->second.ptr()) != 0) {
        throw pybind11::error_already_set();
      }
    }
  }
}

// The constructor of torch.FloatTensor and similar types, and the function to call first. The types
// are C++'s, so their attributes cannot be set.
newfunc typed_new = nullptr;
PyObject* asked_first = nullptr;

PyObject* ask_or_make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  if (PyTuple_Size(args) > 0 && THPVariable_Check(PyTuple_GetItem(args, 0)) &&
      !THPVariable_CheckExact(PyTuple_GetItem(args, 0))) {
    PyObject* made = PyObject_CallFunctionObjArgs(asked_first, type, args, nullptr);
    if (made != Py_None) {
      return made;
    }
    Py_DECREF(made);
  }
  return typed_new(type, args, kwargs);
}

// Makes the constructors of `types` first call `ask(type, args)`, which returns a tensor, or None
// to let torch construct it.
void ask_before_typed(const pybind11::iterable& types, const pybind11::function& ask) {
  asked_first = pybind11::object(ask).release().ptr();
  for (const auto& each : types) {
    auto* type = reinterpret_cast<PyTypeObject*>(each.ptr());
    typed_new = type->tp_new == ask_or_make ? typed_new : type->tp_new;
    type->tp_new = ask_or_make;
  }
}

} // namespace

void register_shards(pybind11::module_& module) {
  module.def("define_grad", define_grad, pybind11::arg("type"));
  module.def("counted", counted, pybind11::arg("tensor"));
  module.def("counted_view", counted_view, pybind11::arg("leaf"), pybind11::arg("view"));
  module.def("count_as_data", count_as_data, pybind11::arg("tensor"), pybind11::arg("alias"));
  module.def(
      "count_view_as_data", count_view_as_data, pybind11::arg("view"), pybind11::arg("alias"));
  module.def("window_on", window_on, pybind11::arg("memory"));
  module.def("move_window", move_window, pybind11::arg("window"), pybind11::arg("memory"));
  module.def("free_memory", free_memory, pybind11::arg("tensor"), pybind11::arg("message"));
  module.def("take_memory", [](const at::Tensor& tensor) {
    const auto nbytes = static_cast<int64_t>(tensor.storage().nbytes());
    give_memory(tensor, allocate_memory(tensor.device(), nbytes));
  });
  module.def("replace_in_modules", replace_in_modules, pybind11::arg("replaced"));
  module.def("ask_before_typed", ask_before_typed, pybind11::arg("types"), pybind11::arg("ask"));
  module.def("same_objects", same_objects, pybind11::arg("first"), pybind11::arg("second"));
  module.def(
      "take_node_hooks",
      [](const at::Tensor& from, const at::Tensor& to) {
        using Node = std::shared_ptr<void>;
        auto held = std::make_unique<Node>(take_node_hooks(from, to));
        return pybind11::capsule(
            held.release(), [](void* node) { delete static_cast<Node*>(node); });
      },
      pybind11::arg("from_"),
      pybind11::arg("to"));
  module.def(
      "exchange_impls",
      [](const pybind11::object& first, const pybind11::object& second) {
        exchange_impls(first.ptr(), second.ptr());
      },
      pybind11::arg("first"),
      pybind11::arg("second"));
  module.def("show_grad", show_grad, pybind11::arg("param"), pybind11::arg("grad"));
}

} // namespace zerocore

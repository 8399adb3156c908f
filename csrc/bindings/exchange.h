// Exchanges the contents of two Python tensors: their TensorImpl, hooks, slots and class.
//
// Note [One object]
// Programs use a parameter's Python object as a key, set attributes on it and keep it, so the
// user's object stays in the module. Between calls it is the shard. While a module shows the
// parameter, it is the full tensor, and a hidden object of the engine is the shard. Attributes stay
// with the object. Hooks move with the impl, because autograd calls the hooks of an impl.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <utility>

namespace zerocore {

// Sets the Python object of an impl. Torch 2.11 has `init_pyobj`, later releases `store_pyobj`.
template <typename Slot>
void set_object(Slot& slot, PyObject* object) {
  if constexpr (requires { slot.store_pyobj(object); }) {
    slot.store_pyobj(object);
  } else {
    slot.init_pyobj(object);
  }
}

// Exchanges only the impls and their hooks. The caller must hold the GIL.
inline void exchange_impls(PyObject* first, PyObject* second) {
  auto* a = reinterpret_cast<THPVariable*>(first);
  auto* b = reinterpret_cast<THPVariable*>(second);
  // An impl with a second owner keeps its Python object alive. Both impls have a second owner here,
  // so both keep their objects alive before and after the exchange.
  const at::Tensor of_a = THPVariable_Unpack(a); // NOLINT(performance-unnecessary-copy-*)
  const at::Tensor of_b = THPVariable_Unpack(b); // NOLINT(performance-unnecessary-copy-*)
  std::swap(a->cdata, b->cdata);
  set_object(*of_a.unsafeGetTensorImpl()->pyobj_slot(), second);
  set_object(*of_b.unsafeGetTensorImpl()->pyobj_slot(), first);
  std::swap(a->backward_hooks, b->backward_hooks);
  std::swap(a->post_accumulate_grad_hooks, b->post_accumulate_grad_hooks);
}

// The caller must hold the GIL. Python has assigned `__class__` to both objects before, so their
// types have one layout, and neither object stores its `__dict__` by the keys of its type.
inline void exchange(PyObject* first, PyObject* second) {
  exchange_impls(first, second);
  // A DTensor's slots begin where a Parameter ends.
  const auto slots = reinterpret_cast<PyTypeObject*>(ParameterClass)->tp_basicsize;
  for (auto at = slots; at < Py_TYPE(first)->tp_basicsize; at += sizeof(PyObject*)) {
    std::swap(
        *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(first) + at),
        *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(second) + at));
  }
  PyTypeObject* class_of_a = Py_TYPE(first); // an object owns a reference to its class, too
  Py_SET_TYPE(first, Py_TYPE(second));
  Py_SET_TYPE(second, class_of_a);
}

} // namespace zerocore

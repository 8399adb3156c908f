// Shows full parameters and shards: in the parameters' own objects, and in modules' dicts.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "bindings/exchange.h"
#include "engine/engine.h"

namespace zerocore {

// Where a parameter is registered: module._parameters and the name in it.
struct ParamOwner {
  pybind11::dict parameters;
  pybind11::str name;
};

struct RegisteredParam {
  pybind11::object object; // the user's, see Note [One object]; null if no program sees it
  pybind11::object hidden;
  bool is_full = false; // the user's is the full one
  // Of a parameter that is no plain tensor. Modules see a view of the full one, which stays hidden.
  std::vector<ParamOwner> owners = {};
  pybind11::object make_view = {};
  pybind11::object view = {};
  bool is_fresh = false; // no call has seen the view
};

class Registrar {
 public:
  explicit Registrar(size_t num_units) : units_(num_units) {}
  Registrar(const Registrar&) = delete;
  Registrar& operator=(const Registrar&) = delete;
  ~Registrar() {
    const pybind11::gil_scoped_acquire gil;
    units_.clear();
  }

  void bind(UnitId unit, RegisteredParam param) {
    units_.at(unit).push_back(std::move(param));
  }

  // Any thread.
  void show(UnitId unit, bool full) {
    const pybind11::gil_scoped_acquire gil;
    for (RegisteredParam& param : units_[unit]) {
      if (param.is_full == full || !param.object) {
        continue;
      }
      if (!param.make_view) {
        exchange(param.object.ptr(), param.hidden.ptr());
      } else if (full) {
        param.view = param.make_view();
        param.is_fresh = true;
        replace(param, param.object, param.view);
      } else {
        replace(param, param.view, param.object);
        param.view = {};
      }
      param.is_full = full;
    }
  }

  // Modules see `make()`, a view of the full parameter, wherever they would see that.
  void set_view(UnitId unit, int index, std::vector<ParamOwner> owners, pybind11::object make) {
    units_.at(unit).at(index).owners = std::move(owners);
    units_.at(unit).at(index).make_view = std::move(make);
  }

  // At a call of a unit that is shown: views belong to the graph of one call.
  void renew_views(UnitId unit) {
    for (RegisteredParam& param : units_.at(unit)) {
      if (param.view && !param.is_fresh) {
        pybind11::object view = param.make_view();
        replace(param, param.view, view);
        param.view = std::move(view);
      }
      param.is_fresh = false;
    }
  }

 private:
  // Another one that was put there for a while (torch.func.functional_call) is the one to use.
  static void replace(
      const RegisteredParam& param,
      const pybind11::object& hidden,
      const pybind11::object& value) {
    for (const ParamOwner& owner : param.owners) {
      PyObject* current = PyDict_GetItemWithError(owner.parameters.ptr(), owner.name.ptr());
      if (current != hidden.ptr() && current != nullptr) {
        continue;
      }
      if (PyDict_SetItem(owner.parameters.ptr(), owner.name.ptr(), value.ptr()) != 0) {
        throw pybind11::error_already_set();
      }
    }
  }

  std::vector<std::vector<RegisteredParam>> units_;
};

} // namespace zerocore

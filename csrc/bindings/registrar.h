// Writes parameters into the dicts of the modules that own them.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "engine/engine.h"

namespace zerocore {

// Where a parameter is registered: module._parameters and the name in it.
struct ParamOwner {
  pybind11::dict parameters;
  pybind11::str name;
};

struct RegisteredParam {
  pybind11::object full;
  pybind11::object shard;
  std::vector<ParamOwner> owners;
};

class DictRegistrar final : public Registrar {
 public:
  explicit DictRegistrar(size_t num_units) : units_(num_units) {}
  DictRegistrar(const DictRegistrar&) = delete;
  DictRegistrar& operator=(const DictRegistrar&) = delete;
  ~DictRegistrar() override {
    const pybind11::gil_scoped_acquire gil;
    units_.clear();
  }

  void bind(UnitId unit, RegisteredParam param) {
    units_.at(unit).push_back(std::move(param));
  }

  void show(UnitId unit, bool full) override {
    const pybind11::gil_scoped_acquire gil;
    for (const RegisteredParam& param : units_[unit]) {
      for (const ParamOwner& owner : param.owners) {
        PyObject* value = full ? param.full.ptr() : param.shard.ptr();
        PyObject* hidden = full ? param.shard.ptr() : param.full.ptr();
        // Another one was put there for a while (torch.func.functional_call): it is the one to use.
        PyObject* current = PyDict_GetItemWithError(owner.parameters.ptr(), owner.name.ptr());
        if (current != hidden && current != nullptr) {
          continue;
        }
        if (PyDict_SetItem(owner.parameters.ptr(), owner.name.ptr(), value) != 0) {
          throw pybind11::error_already_set();
        }
      }
    }
  }

 private:
  std::vector<std::vector<RegisteredParam>> units_;
};

} // namespace zerocore

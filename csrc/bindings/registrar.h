// Shows full parameters and shards.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <utility>
#include <vector>

#include "bindings/exchange.h"
#include "engine/engine.h"

namespace zerocore {

struct RegisteredParam {
  pybind11::object object; // the user's, see Note [One object]; null if no program sees it
  pybind11::object hidden;
  bool is_full = false; // the user's is the full one
  pybind11::object show = {}; // of a parameter that is no plain tensor, see ShownView
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
      if (param.show) {
        param.show(full);
      } else {
        exchange(param.object.ptr(), param.hidden.ptr());
      }
      param.is_full = full;
    }
  }

  // Python shows the parameter, by `show(full)`.
  void set_view(UnitId unit, int index, pybind11::object show) {
    units_.at(unit).at(index).show = std::move(show);
  }

 private:
  std::vector<std::vector<RegisteredParam>> units_;
};

} // namespace zerocore

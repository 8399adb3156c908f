// The engine for Python, and the Python objects of its parameters.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/exchange.h"
#include "engine/engine.h"

namespace zerocore {

struct RegisteredParam {
  pybind11::object object; // the user's object, see Note [One object]; null if nothing is exchanged
  pybind11::object hidden;
  bool is_full = false; // `object` is the full parameter
  pybind11::object show = {}; // for a parameter that is not a plain tensor, see ShownView
};

// Makes a parameter's Python object the full tensor or the shard.
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

  // Thread-safe.
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

  // Calls `show(full)` to show the parameter, instead of exchanging objects.
  void set_view(UnitId unit, int index, pybind11::object show) {
    units_.at(unit).at(index).show = std::move(show);
  }

 private:
  std::vector<std::vector<RegisteredParam>> units_;
};

struct PyEngine {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Registrar> registrar; // the engine calls it
};

// Returns the part of the engine that has this type.
template <typename Part>
Part& part_of(const PyEngine& self) {
  Engine& engine = *self.engine;
  return std::get<Part&>(std::tie(
      engine,
      engine.calls(),
      engine.lifecycle(),
      engine.offload(),
      engine.pool(),
      engine.reducer(),
      engine.reducer().views(),
      engine.trace(),
      *self.registrar));
}

// Binds a method of a part as a method of PyEngine.
template <typename Part, typename Result, typename... Args>
auto method(Result (Part::*called)(Args...)) {
  return [called](PyEngine& self, Args... args) -> Result {
    return (part_of<Part>(self).*called)(std::forward<Args>(args)...);
  };
}
template <typename Part, typename Result, typename... Args>
auto method(Result (Part::*called)(Args...) const) {
  return [called](const PyEngine& self, Args... args) -> Result {
    return (part_of<Part>(self).*called)(std::forward<Args>(args)...);
  };
}

} // namespace zerocore

// The engine as Python has it.
#pragma once

#include <memory>
#include <tuple>
#include <utility>

#include "bindings/registrar.h"
#include "engine/engine.h"

namespace zerocore {

struct PyEngine {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Registrar> registrar; // which the engine calls
};

// The object whose method is called.
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

// Binds a method of one of these as a method of PyEngine.
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

// The engine as Python has it.
#pragma once

#include <memory>
#include <utility>

#include "bindings/registrar.h"
#include "engine/engine.h"

namespace zerocore {

// The engine with the registrar it owns.
struct PyEngine {
  std::shared_ptr<Engine> engine;
  DictRegistrar* registrar = nullptr;
};

// The object whose method is called.
inline Engine& part_of(const PyEngine& self, Engine* /*tag*/) {
  return *self.engine;
}
inline ModelCalls& part_of(const PyEngine& self, ModelCalls* /*tag*/) {
  return self.engine->calls();
}
inline Offload& part_of(const PyEngine& self, Offload* /*tag*/) {
  return self.engine->offload();
}
inline Reducer& part_of(const PyEngine& self, Reducer* /*tag*/) {
  return self.engine->reducer();
}

// Binds a method of one of these as a method of PyEngine.
template <typename Part, typename Result, typename... Args>
auto method(Result (Part::*called)(Args...)) {
  return [called](PyEngine& self, Args... args) -> Result {
    return (part_of(self, static_cast<Part*>(nullptr)).*called)(std::forward<Args>(args)...);
  };
}
template <typename Part, typename Result, typename... Args>
auto method(Result (Part::*called)(Args...) const) {
  return [called](const PyEngine& self, Args... args) -> Result {
    return (part_of(self, static_cast<Part*>(nullptr)).*called)(std::forward<Args>(args)...);
  };
}

// Steps of states that are not on the device.
void register_offload(pybind11::class_<PyEngine>& engine);

} // namespace zerocore

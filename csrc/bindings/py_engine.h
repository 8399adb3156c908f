// The engine as Python has it.
#pragma once

#include <memory>

#include "bindings/registrar.h"
#include "engine/engine.h"

namespace zerocore {

// The engine with the registrar it owns.
struct PyEngine {
  std::shared_ptr<Engine> engine;
  DictRegistrar* registrar = nullptr;
};

// Steps of states that are not on the device.
void register_offload(pybind11::class_<PyEngine>& engine);

} // namespace zerocore

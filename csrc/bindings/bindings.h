// Registers the parts of the Python module: one function per file of this folder.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocore {

void register_plan(pybind11::module_& module);
void register_runtime(pybind11::module_& module);
void register_emulated(pybind11::module_& module);
void register_io(pybind11::module_& module);
void register_engine_types(pybind11::module_& module);
void register_engine(pybind11::module_& module);
void register_shards(pybind11::module_& module);

} // namespace zerocore

// The parts of the module that only tests see, one function per file of this folder.
#pragma once

#include <pybind11/pybind11.h>

namespace zerocore {

void register_bucket_pool(pybind11::module_& module);
void register_dissemination(pybind11::module_& module);
void register_kernels(pybind11::module_& module);
void register_reduction(pybind11::module_& module);
void register_roll_call(pybind11::module_& module);
void register_schedule(pybind11::module_& module);

} // namespace zerocore

// The extension module zerocore._C.
#include "bindings/bindings.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "C++ runtime of zerocore.";
  zerocore::register_plan(module);
  zerocore::register_kernels(module);
  zerocore::register_runtime(module);
  zerocore::register_engine(module);
}

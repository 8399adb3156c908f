// Value type of a parameter as the planner sees it: names and integers, no tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/math.h"

namespace zerocore {

struct ParamSpec {
  std::string fqn;
  std::vector<int64_t> shape;
  int dtype = 0; // c10::ScalarType as a number; only compared, never interpreted here
  int64_t itemsize = 0; // bytes of one element
  bool requires_grad = true;

  int64_t numel() const {
    int64_t numel = 1;
    for (const int64_t size : shape) {
      numel = checked_mul(numel, size);
    }
    return numel;
  }
};

} // namespace zerocore

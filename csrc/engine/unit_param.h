// One parameter of a unit, as tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "plan/param_spec.h"

namespace zerocore {

struct UnitParam {
  ParamSpec spec;
  std::vector<int64_t> strides; // of the full parameter; dense in some order of its dimensions
  at::Tensor full; // the leaf that forward and backward compute with
  at::Tensor shard; // the leaf that the optimizer sees, 1-D
  bool lacks_main = false; // frozen and cast: there is no main weight to train
  bool hooked = false; // the leaf reports its gradient
  const c10::StorageImpl* home = nullptr; // where the shard's memory must stay
};

std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params);
// A parameter whose shard has left the memory of its unit (`p.data = other`), or null.
const UnitParam* find_moved(const std::vector<UnitParam>& params);

// A unit before it is made.
struct UnitSpec {
  std::string name;
  std::vector<UnitParam> params;
};

} // namespace zerocore

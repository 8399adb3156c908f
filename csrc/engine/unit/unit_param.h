// One parameter of a unit, as tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/functional.h>

#include <string>
#include <vector>

#include "engine/unit/data_writes.h"
#include "plan/layout.h"

namespace zerocore {

struct UnitParam {
  ParamSpec spec;
  std::vector<int64_t> strides; // of the full parameter; dense in some order of its dimensions
  at::Tensor full; // the leaf that forward and backward compute with
  at::Tensor shard; // the leaf that the optimizer sees: 1-D, or by rows a DTensor
  at::Tensor local; // by rows: the memory of that, with a shape
  c10::VariableVersion full_writes, shard_writes; // see Note [Writes through data]
  bool lacks_main = false; // frozen and cast: there is no main weight to train
  bool hooked = false; // the leaf reports its gradient
  bool trained = false; // requires_grad of both leaves, when they were last made to agree
  const c10::StorageImpl* home = nullptr; // where the shard's memory must stay
  const c10::StorageImpl* full_home = nullptr; // what the full one is gathered into
};

// The memory that is gathered and updated.
inline const at::Tensor& memory_of(const UnitParam& param) {
  return param.local.defined() ? param.local : param.shard;
}

inline std::vector<ParamSpec> specs_of(const std::vector<UnitParam>& params) {
  return c10::fmap(params, [](const UnitParam& param) { return param.spec; });
}

// A unit before it is made.
struct UnitSpec {
  std::string name;
  std::vector<UnitParam> params;
  bool stays = false; // unsharded from its forward to its backward
  bool near = true; // gathers again from near ranks, where there are some
  int mesh = 0; // of EngineOptions
};

} // namespace zerocore

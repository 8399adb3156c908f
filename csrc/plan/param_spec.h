// Value type of a parameter as the planner sees it: names and integers, no tensor.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/math.h"

namespace zerocore {

// Type of an element.
struct ElementType {
  int dtype = 0; // c10::ScalarType as a number; only compared, never interpreted here
  int64_t itemsize = 0; // bytes; 0 where the type is not given

  bool operator==(const ElementType& other) const = default;
};

struct ParamSpec {
  std::string fqn;
  std::vector<int64_t> shape;
  int dtype = 0; // what layers compute with and gathers move
  int64_t itemsize = 0; // bytes of one element
  bool requires_grad = true;
  // Of a parameter that requires grad, the parameter's own where not given: the optimizer's copy,
  // gradients on their way, and gradients as they are kept.
  ElementType main = {}, reduce = {}, grad = {};
  ElementType gather = {}; // of one byte, with scales, see common/scaled_blocks.h; else as it is
  // Else other parameters of the unit are gathered in its place, and the unit is laid out by rows.
  bool is_gathered = true;
  bool is_kept = true; // else its shards are no memory of the unit; only if it is not gathered

  int64_t numel() const {
    int64_t numel = 1;
    for (const int64_t size : shape) {
      numel = checked_mul(numel, size);
    }
    return numel;
  }
  // The shape of so many rows that they have `part` elements.
  std::vector<int64_t> rows_of(int64_t part) const {
    std::vector<int64_t> sizes = shape;
    sizes.front() = part == 0 ? 0 : part / (numel() / shape.front());
    return sizes;
  }
};

} // namespace zerocore

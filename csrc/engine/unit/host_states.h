// The states of a model in the host's memory: one mapping, of the size that the plan says, and the
// memory of the units' buckets in it.
#pragma once

#include <c10/core/Allocator.h>

#include <memory>
#include <optional>

#include "engine/unit/unit.h"
#include "plan/host_layout.h"
#include "runtime/host_memory.h"

namespace zerocore {

class HostStates {
 public:
  HostStates() = default; // of nothing until plan()
  HostStates(const HostStates&) = delete;
  HostStates& operator=(const HostStates&) = delete;

  // Takes no memory.
  void plan(const Units& units, const UnitContext& context);
  // Maps the planned memory, and pins the part that a CUDA device copies. Throws c10::Error where
  // there is too little.
  void open();
  // Of a unit's part, zeros at first.
  c10::DataPtr memory(UnitId unit, Memory part) const;
  // Of a region's gradient. One that was frozen when the model was sharded has none.
  c10::DataPtr gradient(UnitId unit, int region) const;

  const HostLayout& layout() const {
    return *layout_;
  }
  // Null before open().
  const std::shared_ptr<HostMemory>& mapped() const {
    return memory_;
  }

 private:
  c10::DataPtr at(const Range& range) const;

  std::optional<HostLayout> layout_;
  HostMemoryOptions options_;
  std::shared_ptr<HostMemory> memory_;
};

} // namespace zerocore

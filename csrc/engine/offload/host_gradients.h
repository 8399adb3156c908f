// Gradients on the host, sums of their squares, and moments: each update there works on these.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "engine/offload/step_worker.h"
#include "engine/unit/unit.h"
#include "plan/layout.h"

namespace zerocore {

// -- gradients that a device keeps in the host's memory -------------------------------------------
//
// Note [Gradients of a device on the host]
// A reduction leaves its result in a block of the pool. It is copied to the host beside the other
// streams, and the block is free when the copy is done. Where there is a gradient already, or where
// gradients travel in another type than they are kept in, it is copied to one of two buffers, from
// which the worker adds it; otherwise to its place. Readers of gradients wait for the worker.

// `host` becomes what `from`, on the device, is on the compute stream now; the event is behind the
// copy. The unit is named in logs.
StreamEvent copy_to_host(const Unit& unit, const at::Tensor& host, const at::Tensor& from);

class HostGradients {
 public:
  // Both outlive it.
  HostGradients(const UnitContext& context, StepWorker& worker)
      : context_(context), worker_(worker) {}

  // `kept`, on the host, becomes what `from`, on the device, is on the compute stream now, or gets
  // it added. Both are 1-D. Blocks while both buffers are in use.
  StepWorker::Ticket offload_grad(
      const Unit& unit,
      const at::Tensor& from,
      const at::Tensor& kept,
      bool adds);

 private:
  at::Tensor take_buffer(const at::Tensor& like);

  const UnitContext& context_;
  StepWorker& worker_;
  std::array<StepWorker::Ticket, 2> used_until_ = {}; // by buffer
  size_t current_ = 0; // the buffer that was taken last
};

// -- sums of squares of a unit's gradients on the host, taken as they arrive ----------------------
//
// They are kept chunk by chunk: whoever adds them in the order of all parameters gets the bits of a
// sum over the gradients themselves.

class ArrivedSquares {
 public:
  // `layout` outlives it; `shard` is this rank's.
  ArrivedSquares(const Layout& layout, int64_t shard);

  // The work of another thread once `gradient`, this rank's part of a region, 1-D, has come. From
  // here on the region's squares are known.
  std::function<void()> take(int region, const at::Tensor& gradient);
  void forget();
  bool has(int region) const {
    return is_known_[region];
  }
  // Those of a parameter, of a region that has() them: see kernels::squares_by_chunk.
  at::Tensor of(int param) const;

 private:
  const Layout& layout_;
  int64_t shard_;
  std::vector<int64_t> first_chunks_; // by parameter, in its region
  std::vector<int64_t> num_chunks_; // by region
  std::vector<at::Tensor> squares_; // by region; memory comes with the first gradient
  std::vector<bool> is_known_; // by region
};

// -- moments of AdamW where there is a place for them: in the host's mapping or in the file -------

class Moments {
 public:
  // The units outlive it, and their memory is there.
  Moments(const Units& units, const UnitContext& context);

  // Both of a trained parameter, 1-D, zeros; none of others, and none while an optimizer has them.
  std::vector<at::Tensor> make(UnitId unit, int param);
  // Whether make() has given them before: it writes to what may be in use.
  bool had(UnitId unit, int param) const {
    return units_.at(unit).given.at(param).has_value();
  }

 private:
  using Given = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct OfUnit {
    const Unit& unit;
    std::array<std::optional<Bucket>, 2> buckets; // exp_avg, exp_avg_sq
    std::vector<std::optional<Given>> given; // by parameter
  };

  std::vector<OfUnit> units_;
};

} // namespace zerocore

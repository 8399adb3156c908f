// The tensors that an update on the host reads: gradients, their squares, and moments.
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

// -- gradients of a device, kept in the host's memory ---------------------------------------------
//
// Note [Gradients of a device on the host]
// A reduction writes its result to a block of the pool. The DeviceToHost stream copies it to the
// host, and the block is free after the copy. The copy goes to the kept gradient, with two
// exceptions: a gradient exists already, or gradients travel in another dtype than the dtype of
// kept gradients. It then goes to one of two buffers, and the worker adds it. Readers of gradients
// wait for the worker.

// Copies `from`, on the device, to `host`, after earlier work of the compute stream. Returns an
// event after the copy. Logs name the unit.
StreamEvent copy_to_host(const Unit& unit, const at::Tensor& host, const at::Tensor& from);

class HostGradients {
 public:
  // Both arguments must outlive the object.
  HostGradients(const UnitContext& context, StepWorker& worker)
      : context_(context), worker_(worker) {}

  // Copies `from`, on the device, to `kept`, on the host, or adds it, after earlier work of the
  // compute stream. Both are 1-D. Blocks while both buffers are in use.
  StepWorker::Ticket offload_grad(
      const Unit& unit,
      const at::Tensor& from,
      const at::Tensor& kept,
      bool adds);

 private:
  at::Tensor take_buffer(const at::Tensor& like);

  const UnitContext& context_;
  StepWorker& worker_;
  std::array<StepWorker::Ticket, 2> used_until_ = {}; // by buffer: the work that reads it last
  size_t current_ = 0; // the buffer of the last copy
};

// -- squares of a unit's gradients on the host, summed as they arrive -----------------------------
//
// There is one sum for each chunk. Added in the order of all parameters, they give bit for bit the
// sum over the gradients themselves.

class ArrivedSquares {
 public:
  // `layout` must outlive the object; `shard` is this rank's shard.
  ArrivedSquares(const Layout& layout, int64_t shard);

  // Returns the work that sums the squares of `gradient`, this rank's part of a region, 1-D. The
  // worker runs it when the gradient has arrived. has(region) is true from now on.
  std::function<void()> take(int region, const at::Tensor& gradient);
  void forget();
  bool has(int region) const {
    return is_known_[region];
  }
  // Returns a parameter's sums, see kernels::squares_by_chunk. has() must be true for its region.
  at::Tensor of(int param) const;

 private:
  const Layout& layout_;
  int64_t shard_;
  std::vector<int64_t> first_chunks_; // by parameter: index of its first chunk in the region
  std::vector<int64_t> num_chunks_; // by region
  std::vector<at::Tensor> squares_; // by region; the first gradient allocates it
  std::vector<bool> is_known_; // by region
};

// -- moments of AdamW in the host's mapping or in the file ----------------------------------------

class Moments {
 public:
  // The units must outlive the object. The mapping or the file must exist already.
  Moments(const Units& units, const UnitContext& context);

  // Returns exp_avg and exp_avg_sq of a trained parameter, zeroed. Returns an empty vector for a
  // parameter that is not trained, or while another optimizer's exp_avg is alive.
  std::vector<at::Tensor> make(UnitId unit, int param);
  // Returns whether make() has returned these moments before. Then wait for updates before the next
  // make(), which zeroes them.
  bool had(UnitId unit, int param) const {
    return units_.at(unit).given.at(param).has_value();
  }

 private:
  using Given = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct OfUnit {
    const Unit& unit;
    std::array<std::optional<Bucket>, 2> buckets; // exp_avg, exp_avg_sq
    std::vector<std::optional<Given>> given; // by parameter: the last exp_avg of make()
  };

  std::vector<OfUnit> units_;
};

} // namespace zerocore

// The main weights of a unit (FSDP2's float32 sharded parameters, Megatron's main parameters).
//
// Note [Main and model weights]
// Layers compute with model weights, which all-gathers move. If the optimizer updates another
// dtype, this rank also holds main weights, of its own shard only. They are cast to model weights
// once after every change, not for every all-gather. Checkpoints hold main weights.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/unit/unit_context.h"
#include "memory/bucket.h"
#include "plan/layout.h"

namespace zerocore {

class MainWeights {
 public:
  // The context and `unit`, the unit's name, must outlive the object. Allocates nothing.
  MainWeights(const Layout& layout, const UnitContext& context, const std::string& unit);
  // Sets this rank's part of a region's model weights, 1-D, which the casts write.
  void set_model(int region, at::Tensor model) {
    model_[region] = std::move(model);
  }

  bool has(int region) const {
    return main_ && main_->has(region);
  }
  bool empty() const {
    return !main_;
  }
  // Returns this rank's main weights of a region, 1-D; the region must have them.
  const at::Tensor& full(int region) const {
    return main_->full(region);
  }
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes) const {
    return main_->view(region, offset, sizes);
  }
  // Returns a view of the host's copy that is cast for sending. Undefined if the region has no copy
  // and sends the main weights themselves.
  at::Tensor written_view(int region, int64_t offset, at::IntArrayRef sizes) const;

  // Allocates the memory if there is none.
  void allocate(UnitId id);
  // Copies `own` into a region.
  void fill(int region, const at::Tensor& own) const;
  // Copies the elements of `own`, model weights, that differ from the rounded main weights.
  void copy_changed(int region, int64_t offset, const at::Tensor& own) const;
  // Casts main weights to model weights. If only the main weights are on the host, sends the result
  // to the device.
  void cast() const;
  // Sends weights from the host to the device, between earlier and later work of the compute
  // stream. The host waits for the copy.
  void return_weights() const;
  // return_weights() in two parts: order_send() on the caller's thread, then send() on any thread.
  void order_send() const;
  void send(bool blocks = false) const;

  at::Tensor bytes() const {
    return main_->bytes();
  }
  // Return the bytes of main weights on the device, and the bytes that the host sends to it.
  int64_t device_nbytes() const;
  int64_t sent_nbytes() const;

 private:
  std::vector<int> regions() const {
    return main_ ? main_->regions() : std::vector<int>();
  }
  bool is_cast_for_sending(int region) const {
    return sent_ && sent_->has(region);
  }

  const UnitContext& context_;
  const std::string& unit_;
  std::optional<Bucket> main_;
  std::optional<Bucket> sent_; // on the host: main weights cast to the dtype of model weights
  std::vector<at::Tensor> model_; // by region
};

} // namespace zerocore

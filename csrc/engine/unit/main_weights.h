// Weights of a unit that its optimizer updates, where layers compute with others.
//
// Note [Main and model weights]
// Layers compute with model weights, which gathers move. Where the optimizer is to update another
// dtype, this rank also holds main weights, its shard only; they are cast to model weights once
// after every change, not once for every gather. Loads and saves take main weights.
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
  // `unit` outlives it. Allocates nothing.
  MainWeights(const Layout& layout, const UnitContext& context, const std::string& unit);
  // This rank's part of a region's model weights, 1-D.
  void set_model(int region, at::Tensor model) {
    model_[region] = std::move(model);
  }

  bool has(int region) const {
    return main_ && main_->has(region);
  }
  bool empty() const {
    return !main_;
  }
  // 1-D, this rank's elements of a region that has them.
  const at::Tensor& full(int region) const {
    return main_->full(region);
  }
  at::Tensor view(int region, int64_t offset, at::IntArrayRef sizes) const {
    return main_->view(region, offset, sizes);
  }
  // A part of what is sent in the place of main weights; undefined where these are sent themselves.
  at::Tensor written_view(int region, int64_t offset, at::IntArrayRef sizes) const;

  // Allocates the memory if there is none.
  void allocate(UnitId id);
  // Takes values of a region.
  void fill(int region, const at::Tensor& own) const;
  // Takes over those model weights of a region that are no rounded main weights.
  void copy_changed(int region, int64_t offset, const at::Tensor& own) const;
  // Casts to model weights, on the compute stream; those on the host are sent.
  void cast() const;
  // Sends weights from the host to the device: between what the compute stream was given and what
  // it will be, and the host waits. Or in two parts, of which another thread may do the second.
  void return_weights() const;
  void order_send() const;
  void send(bool blocks = false) const;

  at::Tensor bytes() const {
    return main_->bytes();
  }
  // Bytes of main weights on the device; and of what is sent.
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
  std::optional<Bucket> sent_; // on the host: main weights as layers compute with them
  std::vector<at::Tensor> model_; // by region
};

} // namespace zerocore

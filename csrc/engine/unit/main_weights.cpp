#include "engine/unit/main_weights.h"

#include <ATen/ops/where.h>

#include "kernels/ops.h"

namespace zerocore {

MainWeights::MainWeights(const Layout& layout, const UnitContext& context, const std::string& unit)
    : context_(context), unit_(unit), model_(layout.regions().size()) {
  const Layout own = layout.of_shard(context.mesh.shard());
  const std::string owner = "unit '" + unit + "'";
  if (const auto regions = context.tiers.main_regions(layout); !regions.empty()) {
    const c10::Device device = context.device_of(context.tiers.states);
    main_.emplace(own.retyped(&Region::main), regions, 0, device, owner);
  }
  if (const auto regions = context.tiers.sent_regions(layout); !regions.empty()) {
    sent_.emplace(own, regions, 0, c10::kCPU, owner);
  }
}

at::Tensor MainWeights::written_view(int region, int64_t offset, at::IntArrayRef sizes) const {
  if (is_cast_for_sending(region)) {
    return sent_->view(region, offset, sizes);
  }
  return {};
}

void MainWeights::allocate(UnitId id) {
  const Tier tier = context_.tiers.states;
  if (main_ && !main_->attached()) {
    main_->attach(context_.memory_of(tier, id, Memory::Main, *main_));
  }
  if (sent_ && !sent_->attached()) {
    sent_->attach(context_.memory_of(tier, id, Memory::Sent, *sent_));
  }
}

void MainWeights::fill(int region, const at::Tensor& own) const {
  if (has(region)) {
    full(region).copy_(own);
  }
  if (is_cast_for_sending(region)) {
    sent_->full(region).copy_(own); // an update may write only some elements
  }
}

void MainWeights::copy_changed(int region, int64_t offset, const at::Tensor& own) const {
  const at::Tensor main = full(region).narrow(0, offset, own.numel());
  const at::Tensor here = own.to(main.device());
  main.copy_(at::where(main.to(own.scalar_type()).eq(here), main, here.to(main.scalar_type())));
}

void MainWeights::cast() const {
  const Streams& streams = *context_.streams;
  for (const int region : regions()) {
    if (!model_[region].defined()) {
      continue; // the region is not gathered
    }
    if (!context_.tiers.returns_weights()) {
      streams.note_read(StreamRole::Compute, full(region), "is cast", unit_);
      streams.note_write(StreamRole::Compute, model_[region], "is cast", unit_);
      kernels::cast(model_[region], {full(region)}, {0});
    } else if (is_cast_for_sending(region)) {
      kernels::cast(sent_->full(region), {full(region)}, {0});
    }
  }
  if (context_.tiers.returns_weights()) {
    return_weights();
  }
}

void MainWeights::return_weights() const {
  order_send();
  send(/*blocks=*/true); // the caller may change the weights next
  context_.streams->order(StreamRole::Compute, StreamRole::HostToDevice);
}

void MainWeights::order_send() const {
  context_.streams->order(StreamRole::HostToDevice, StreamRole::Compute);
  for (const int region : regions()) {
    context_.streams->note_write(StreamRole::HostToDevice, model_[region], "is sent", unit_);
  }
}

void MainWeights::send(bool blocks) const {
  const auto guard = context_.streams->use(StreamRole::HostToDevice);
  for (const int region : regions()) {
    const Bucket& from = is_cast_for_sending(region) ? *sent_ : *main_;
    model_[region].copy_(from.full(region), /*non_blocking=*/!blocks);
  }
}

int64_t MainWeights::device_nbytes() const {
  return main_ && !context_.tiers.has_host_states() ? main_->nbytes() : 0;
}

int64_t MainWeights::sent_nbytes() const {
  int64_t nbytes = 0;
  for (const int region : regions()) {
    nbytes += static_cast<int64_t>(model_[region].nbytes());
  }
  return nbytes;
}

} // namespace zerocore

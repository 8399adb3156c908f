// Gathers the parameters of a unit from the ranks that hold them, where this rank's part is not on
// the device from the host or the disk first; decides nothing. See plan/unsharding.h, which does.
#pragma once

#include <optional>
#include <vector>

#include "engine/unit/unit_context.h"
#include "plan/unsharding.h"
#include "runtime/bucket.h"
#include "runtime/collectives.h"

namespace zerocore {

class Unit;

class Gathers final : private GatherSteps {
 public:
  // All outlive it. `full`: what layers compute with. `own`: this rank's part; null where it is in
  // `full`. The unit has its layout by then.
  Gathers(const Unit& unit, Bucket& full, const Bucket* own);

  UnitState state() const {
    return unsharding_.state();
  }
  // See Unsharding.
  void begin(const std::vector<int>& regions, int64_t version);
  // Orders compute behind the gathers, or blocks, see PendingCollective::wait.
  void wait() {
    unsharding_.wait(*this);
  }
  void reshard() {
    unsharding_.reshard(*this);
  }
  // See Unsharding; false frees the memory, too.
  void set_keeps_near(bool keeps);
  // Bytes kept for near ranks.
  int64_t near_nbytes() const {
    return near_.empty() ? 0 : context_.mesh.near_nbytes(layout_.nbytes());
  }
  // Behind the last copy from parameters on the host, which may not change before; null for none.
  const StreamEvent& loaded() const {
    return loaded_;
  }

 private:
  void run(const GatherStep& step) override;
  Bucket& bucket_of(Memory memory) {
    return memory == Memory::Received ? *received_ : full_;
  }
  Slot& slot_of(Memory memory) {
    return memory == Memory::Received ? received_slot_ : full_slot_;
  }
  void take(const GatherStep& step);
  void give_back(const GatherStep& step);
  void load(const GatherStep& step);
  void encode(const GatherStep& step);
  void start_across(const GatherStep& step);
  void wait_across();
  void start(const GatherStep& step);
  void issue(
      Collectives& collectives,
      const GatherStep& step,
      const at::Tensor& to,
      const at::Tensor& from);
  void launch();
  void finish();
  void copy_out();
  void keep();
  at::Tensor part_of(const Axis& axis, int region) const;
  at::Tensor source_of(const GatherStep& step);

  const Unit& unit_;
  const UnitContext& context_;
  const Layout& layout_;
  Bucket& full_;
  const Bucket* own_;
  std::optional<Bucket> received_; // where parameters come in another order
  Unsharding unsharding_;
  int64_t version_ = -1; // of the parameters, when the last gather began
  Slot full_slot_, received_slot_;
  std::vector<CollectiveCall> together_; // to be one launch
  Collectives* together_by_ = nullptr;
  std::vector<PendingCollective> pending_;
  StreamEvent loaded_;
  std::vector<at::Tensor> near_; // bytes by region, see Note [Near ranks]; empty before the first
  StreamEvent kept_; // behind the copies to `near_`
};

} // namespace zerocore

// Carries out the steps of one unit with tensors and collectives; decides nothing. See
// plan/steps.h.
#pragma once

#include <vector>

#include "comm/collectives.h"
#include "engine/unit/unit_context.h"
#include "engine/unit/unit_memory.h"
#include "plan/steps.h"

namespace zerocore {

class Unit;

// Of the unit's gradient scale, the factor that a step applies: see Note [Scale of gradients].
double scale_of(const Step& step, const Unit& unit);

class StepRunner final : public Steps {
 public:
  // Both outlive it. The unit has its layout by then.
  StepRunner(const Unit& unit, UnitMemory& memory);

  // All but what needs the parameters' gradients or the thread of an offload.
  void run(const Step& step) override;
  // Starts the collectives of a unit's regions that go as one launch.
  void launch();
  // Forgets them, as they have failed.
  void forget_launch() {
    together_.clear();
  }
  void drop_near();
  // Behind the last copy from parameters on the host, which may not change before; null for none.
  const StreamEvent& loaded() const {
    return loaded_;
  }

 private:
  struct Joint {
    CollectiveCall call;
    std::vector<PendingCollective>* pending = nullptr; // gets it
  };

  void move(const Step& step);
  void load(const Step& step);
  void encode(const Step& step);
  void copy_out();
  void keep_near();
  void cast(const Step& step);
  void sum(const Step& step);
  void start(const Step& step);
  void wait(const Step& step);
  void make_ready(const Step& step);
  std::vector<PendingCollective>& pending_of(const Step& step) {
    return is_gather(step) ? gathers_ : reductions_[step.region];
  }
  static bool is_gather(const Step& step) {
    return step.to == Memory::Full || step.to == Memory::Received;
  }

  const Unit& unit_;
  const UnitContext& context_;
  const Layout& layout_;
  UnitMemory& memory_;
  std::vector<PendingCollective> gathers_;
  std::vector<std::vector<PendingCollective>> reductions_; // by region
  std::vector<Joint> together_; // to be one launch
  TraceOp together_op_ = TraceOp::AllGather;
  Collectives* together_by_ = nullptr;
  StreamEvent loaded_;
  StreamEvent near_kept_; // behind the copies to Near
};

} // namespace zerocore

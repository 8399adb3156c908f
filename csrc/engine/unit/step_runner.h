// Carries out the steps of one unit with tensors and collectives. See plan/steps.h.
#pragma once

#include <vector>

#include "comm/collectives.h"
#include "engine/unit/unit_context.h"
#include "engine/unit/unit_memory.h"
#include "plan/steps.h"

namespace zerocore {

class Unit;

// Returns the factor of a step's part of the unit's gradient scale, see Note [Scale of gradients].
double scale_of(const Step& step, const Unit& unit);

class StepRunner final : public Steps {
 public:
  // Both arguments must outlive the object. The unit's layout must exist already.
  StepRunner(const Unit& unit, UnitMemory& memory);

  // Carries out a step. The reducer carries out steps that need `.grad` or the host.
  void run(const Step& step) override;
  // Starts the coalesced collectives of the unit's regions as one launch.
  void launch();
  // Drops collectives that were not launched because an earlier step failed.
  void forget_launch() {
    together_.clear();
  }
  void drop_near();
  // Returns the event after the last copy from parameters on the host, which must not change before
  // it. Null if there was no copy.
  const StreamEvent& loaded() const {
    return loaded_;
  }

 private:
  struct Joint {
    CollectiveCall call;
    std::vector<PendingCollective>* pending = nullptr; // receives the started collective
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
  std::vector<Joint> together_; // coalesced, not launched yet
  TraceOp together_op_ = TraceOp::AllGather;
  Collectives* together_by_ = nullptr;
  StreamEvent loaded_;
  StreamEvent near_kept_; // recorded after the copies to Near
};

} // namespace zerocore

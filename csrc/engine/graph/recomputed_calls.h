// Finds which call of the forward a checkpoint makes again.
//
// Nodes of autograd are numbered as they are made. While a node runs, the backward has left the
// calls that began behind it. A reentrant checkpoint is one node; its forward runs right behind it
// and records nothing, so the calls without a graph that follow the node, up to the first one whose
// backward has come, are those that it makes again, in their order. Calls that a checkpoint makes
// again without being reentrant are not looked for: hooks on the outputs of its forward tell of
// them.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "engine/graph/autograd.h"
#include "engine/graph/untracked_backward.h"

namespace zerocore {

class RecomputedCalls {
 public:
  struct Found {
    BackwardPlace place;
    CallHandle call; // of pass -1 if it is not known
  };

  // A call has been left. `has_graph`: it began with grad mode on; `again`: by a checkpoint in a
  // backward, and known until that ends.
  void add(const RecordedCall& call, bool has_graph, bool again);
  // The unit is entered by the node that runs on this thread.
  Found find(UnitId unit);
  void end_backward();
  // Forgets the calls of passes before `oldest`.
  void forget(int64_t oldest_pass);
  void reset();

 private:
  struct Made {
    RecordedCall recorded;
    bool has_graph = false;
    bool again = false;
    bool found = false; // in this backward
  };

  void look_behind();
  BackwardPlace place_behind(int64_t pass) const;

  std::deque<Made> calls_; // in the order in which they were left
  GraphNode node_; // of the checkpoint that makes calls again
  int64_t backward_ = -1; // in which it runs
  BackwardPlace place_;
  std::vector<Made*> group_; // its calls, those still to come
};

} // namespace zerocore

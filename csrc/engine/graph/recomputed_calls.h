// Finds the forward call that an activation checkpoint recomputes.
//
// Autograd numbers its nodes in the order of their creation. While a node runs, the backward is
// past all calls that began after this node was created. A reentrant checkpoint is one node; its
// forward runs right after the node is created, without recording a graph. So the checkpoint
// recomputes the calls without a graph that follow the node, in their order, up to the first call
// whose backward has run. A non-reentrant checkpoint needs no search: hooks on the outputs of its
// forward announce the calls.
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
    BackwardPosition position;
    CallHandle call; // the recomputed call; its pass is -1 if unknown
  };

  // Adds a call that has ended. `has_graph`: it began with grad mode on. `again`: a checkpoint made
  // it in a backward; such a call is forgotten when that backward ends.
  void add(const RecordedCall& call, bool has_graph, bool again);
  // Finds the call of the unit that this thread's running node recomputes.
  Found find(UnitId unit);
  void end_backward();
  // Forgets the calls of passes before `oldest_pass`.
  void forget(int64_t oldest_pass);
  void reset();

 private:
  struct Made {
    RecordedCall recorded;
    bool has_graph = false;
    bool again = false;
    bool found = false; // find() has returned it in this backward
  };

  void look_behind();
  BackwardPosition position_behind(int64_t pass) const;

  std::deque<Made> calls_; // in the order in which they ended
  GraphNode node_; // the checkpoint's node
  int64_t backward_ = -1; // the backward that runs the node
  BackwardPosition position_;
  std::vector<Made*> group_; // the checkpoint's calls that find() has not returned yet
};

} // namespace zerocore

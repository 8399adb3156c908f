// The ranks of a unit as axes of a mesh, and the placement of its state over them; the only place
// that knows the numbers of stages.
//
//                       | over the replicas | over the ranks that share the state
//   stage s             | -                 | what stage s shards
//   hybrid, stage s     | replicated        | what stage s shards
//   the same, across    | optimizer sharded | what stage s shards, but 0
//   one rank of each    | replicated        | -
//   experts             | those of their units alone, over some of the model's ranks
//
// Note [Near ranks]
// Where ranks that share parameters have faster links to some of the others, these are `near`: the
// first gather after a change of the parameters comes from all, and from then on each of k near
// ranks keeps a k-th of them, from which it gathers again.
//
// Note [Sharded across]
// Where the optimizer's states are sharded over the replicas, too (HFSDP), each rank owns a part of
// what its replica's shard would be, and updates that alone. Gradients are reduce-scattered over
// the ranks that share the state, then over the replicas. The first gather after an update goes
// over the replicas, which have the parts of a shard, then over the ranks that share the state;
// from then on these are `near`. Parts of one shard follow each other in memory: see
// Region::shard_range.
#pragma once

#include <cstdint>
#include <vector>

#include "plan/layout.h"
#include "plan/shard_options.h"
#include "plan/wire_methods.h"

namespace zerocore {

enum class AxisName : uint8_t { State, Replicas, Near };

inline const char* axis_name(AxisName axis) {
  return axis == AxisName::State ? "state" : axis == AxisName::Replicas ? "replicas" : "near";
}

// Ranks that differ along one dimension of a mesh.
struct Axis {
  int64_t size = 1;
  int64_t rank = 0; // this one's
  WireMethods methods = {};
  AxisName name = AxisName::State;

  // Parts that a reduction over it leaves for each element.
  int64_t parts() const {
    return methods.reduce.parts(size);
  }
};

struct UnitMesh {
  Axis state; // ranks that share the state; where nothing is shared, all that hold the same
  Axis replicas; // ranks that hold the same part of it
  Axis near; // of `state`; see Note [Near ranks]
  bool shards_parameters = false;
  bool shards_gradients = false;
  bool shards_optimizer = false; // its states: main weights and moments
  bool shards_across = false; // the optimizer's states, over the replicas
  bool sums_in_order = false; // of gradients, see Note [Sums in order]
  int64_t divisor = 1; // of sums of gradients, by default the ranks of the mesh

  // Parameters on the host are gathered from there, also by one rank, and gradients that a device
  // keeps on the host pass through a block. `on_host`: the CPU computes.
  // Throws c10::ValueError for a stage other than 0 to 3.
  static UnitMesh of(
      const ShardOptions& sharding,
      Axis state,
      Axis replicas,
      bool on_host,
      Axis near = {});

  const Axis& axis(AxisName name) const {
    return name == AxisName::State ? state : name == AxisName::Replicas ? replicas : near;
  }
  // Ranks along the axis that has the name, also where another one takes its place.
  int64_t num_ranks(AxisName name) const {
    return (state.name == name ? state : replicas.name == name ? replicas : near).size;
  }
  // Equal parts of the state, those of them that make one replica's, and this rank's.
  int64_t num_shards() const {
    return shards_optimizer ? state.size * num_across() : 1;
  }
  int64_t num_across() const {
    return shards_across ? replicas.size : 1;
  }
  int64_t shard() const {
    const int64_t before = shards_across ? replicas.rank * state.size : 0;
    return shards_optimizer ? before + state.rank : 0;
  }
  int64_t world_size() const {
    return state.size * replicas.size;
  }
  bool communicates() const {
    return world_size() > 1;
  }
  // Sums of gradients go over the replicas as well.
  bool sums_across() const {
    return replicas.size > 1;
  }
  // Parts that a reduction over the ranks that share the state leaves for each element.
  int64_t parts() const {
    return shards_optimizer || sums_in_order ? state.parts() : 1;
  }
  // Equal parts of a shard, each summed by another rank.
  int64_t num_cuts() const {
    const int64_t within = shards_optimizer ? 1 : state.size;
    return sums_in_order ? within * (shards_across ? 1 : replicas.size) : 1;
  }
  // Among the ranks that hold a gradient this is the one whose value counts in a sum.
  bool is_first_holder() const {
    return (shards_across || replicas.rank == 0) && (shards_optimizer || state.rank == 0);
  }
  bool gathers_near() const {
    return near.size > 1;
  }
  // The gather of a unit that an optimizer has updated begins when its step ends: full parameters
  // stay, so it takes no memory, and their new values are on the device.
  bool gathers_behind_step(const Layout& layout, const Tiers& tiers) const {
    const bool gathers = shards_optimizer && !shards_parameters;
    return gathers && !layout.copies_out() && !tiers.has_host_states();
  }
  // Parameters are encoded where they are gathered for each use.
  Layout layout_of(std::vector<ParamSpec> params, bool by_rows) const {
    for (ParamSpec& param : params) {
      by_rows = by_rows || !param.is_gathered;
      param.gather = shards_parameters && num_shards() > 1 ? param.gather : ElementType();
    }
    return Layout::build(params, num_shards(), by_rows, num_across(), num_cuts());
  }
  // All gathers come from all ranks.
  UnitMesh without_near() const {
    UnitMesh mesh = *this;
    mesh.near = {};
    return mesh;
  }
  // Of `nbytes` of parameters, those that a rank keeps for the near ones.
  int64_t near_nbytes(int64_t nbytes) const {
    return gathers_near() ? nbytes / near.size : 0;
  }
};

} // namespace zerocore

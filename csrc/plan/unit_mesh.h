// The ranks of a unit as axes of a mesh, and the placement of its state over them. Only this file
// knows what each stage shards.
//
//                       | over the replicas | over the ranks that share the state
//   stage s             | -                 | what stage s shards
//   hybrid, stage s     | replicated        | what stage s shards
//   HFSDP, stage s > 0  | optimizer sharded | what stage s shards
//   replicas alone      | replicated        | -
//   experts             | as above, on a mesh of some of the model's ranks
//
// Note [Near ranks]
// A rank may have faster links to some of the ranks with which it shares parameters (its node).
// These are its near ranks. The first all-gather after a change of the parameters goes over all
// ranks. Then each of k near ranks keeps a k-th of the parameters, and later all-gathers go over
// the near ranks only.
//
// Note [Sharded across]
// In HFSDP the optimizer's states are sharded over the replicas, too: each rank owns and updates a
// part of its replica's shard. Gradients are reduce-scattered over the ranks that share the state,
// then over the replicas. The first all-gather after an update goes over the replicas, which own
// the parts of a shard, then over the ranks that share the state. Later all-gathers go over the
// latter, the near ranks. The parts of one shard are adjacent in memory, see Region::shard_range.
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
  int64_t rank = 0; // this rank's index
  WireMethods methods = {};
  AxisName name = AxisName::State;

  // Returns the number of values per element in the result of a reduction over the axis.
  int64_t parts() const {
    return methods.reduce.parts(size);
  }
};

struct UnitMesh {
  Axis state; // ranks that share the state; the replicas if each rank holds the whole state
  Axis replicas; // ranks that hold the same part of the state
  Axis near; // some ranks of `state`; see Note [Near ranks]
  bool shards_parameters = false;
  bool shards_gradients = false;
  bool shards_optimizer = false; // main weights and moments
  bool shards_across = false; // main weights and moments, over the replicas, too
  bool sums_in_order = false; // see Note [Sums in order]
  int64_t divisor = 1; // divides sums of gradients; by default the size of the mesh

  // Returns the mesh of a stage. Parameters on the host count as sharded even with one rank; so do
  // a device's gradients on the host. `on_host`: the CPU computes. Throws c10::ValueError for a
  // stage other than 0 to 3.
  static UnitMesh of(
      const ShardOptions& sharding,
      Axis state,
      Axis replicas,
      bool on_host,
      Axis near = {});

  const Axis& axis(AxisName name) const {
    return name == AxisName::State ? state : name == AxisName::Replicas ? replicas : near;
  }
  // Returns the size of the axis with this name, even if `state` is the replicas.
  int64_t num_ranks(AxisName name) const {
    return (state.name == name ? state : replicas.name == name ? replicas : near).size;
  }
  // Returns the number of equal shards of the state.
  int64_t num_shards() const {
    return shards_optimizer ? state.size * num_across() : 1;
  }
  // Returns the number of parts into which the replicas cut one replica's shard.
  int64_t num_across() const {
    return shards_across ? replicas.size : 1;
  }
  // Returns the index of this rank's shard.
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
  // Returns whether gradients are also summed over the replicas.
  bool sums_across() const {
    return replicas.size > 1;
  }
  // Returns the number of values per element in the result of a reduction over `state`.
  int64_t parts() const {
    return shards_optimizer || sums_in_order ? state.parts() : 1;
  }
  // Returns the number of parts of a shard that ranks sum, one each, see Note [Sums in order].
  int64_t num_cuts() const {
    const int64_t within = shards_optimizer ? 1 : state.size;
    return sums_in_order ? within * (shards_across ? 1 : replicas.size) : 1;
  }
  // Of the ranks that hold the same reduced gradient, only the first adds it to the next sum.
  bool is_first_holder() const {
    return (shards_across || replicas.rank == 0) && (shards_optimizer || state.rank == 0);
  }
  bool gathers_near() const {
    return near.size > 1;
  }
  // Returns whether the all-gather after an update starts when the step ends. Full parameters must
  // be persistent, so that it takes no memory, and their new values must be on the device.
  bool gathers_behind_step(const Layout& layout, const Tiers& tiers) const {
    const bool gathers = shards_optimizer && !shards_parameters;
    return gathers && !layout.copies_out() && !tiers.has_host_states();
  }
  // Returns the layout of a unit. Only stage 3, which gathers for each use, encodes parameters.
  Layout layout_of(std::vector<ParamSpec> params, bool by_rows) const {
    for (ParamSpec& param : params) {
      by_rows = by_rows || !param.is_gathered;
      param.gather = shards_parameters && num_shards() > 1 ? param.gather : ElementType();
    }
    return Layout::build(params, num_shards(), by_rows, num_across(), num_cuts());
  }
  // Returns the mesh without near ranks: all its all-gathers go over all ranks.
  UnitMesh without_near() const {
    UnitMesh mesh = *this;
    mesh.near = {};
    return mesh;
  }
  // Returns how many of `nbytes` bytes of parameters a rank keeps for its near ranks.
  int64_t near_nbytes(int64_t nbytes) const {
    return gathers_near() ? nbytes / near.size : 0;
  }
};

} // namespace zerocore

// Makes the streams, memory pool, process groups and storage of a model.
#include "engine/resources.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

#include "plan/memory_plan.h"

namespace zerocore {

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::optional<std::string>& name) {
  return name ? c10d::resolve_process_group(*name) : nullptr;
}

std::unique_ptr<Collectives> make_collectives(
    const std::optional<std::string>& name,
    const Streams& streams,
    Alarm* alarm,
    const std::optional<std::string>& reductions = std::nullopt) {
  auto group = find_group(name);
  return group
      ? std::make_unique<Collectives>(std::move(group), streams, alarm, find_group(reductions))
      : nullptr;
}

Axis axis_of(const Collectives* collectives) {
  return collectives == nullptr
      ? Axis{}
      : Axis{collectives->size(), collectives->rank(), collectives->methods()};
}

std::vector<UnitPlan> plans_of(const std::vector<UnitSpec>& units) {
  std::vector<UnitPlan> plans;
  for (const UnitSpec& unit : units) {
    plans.push_back({specs_of(unit.params), {}, unit.stays, unit.near});
  }
  return plans;
}

} // namespace

Resources::Resources(
    const EngineOptions& options,
    c10::Device device,
    const std::vector<UnitSpec>& units,
    const std::vector<CallEvent>& order)
    : streams_(device, options.log_hand_overs ? &hand_overs_ : nullptr),
      pool_(streams_),
      trace_(streams_),
      alarm_(options, units),
      shard_(make_collectives(
          options.groups.shard,
          streams_,
          alarm_.get(),
          options.groups.reductions)),
      replicas_(make_collectives(options.groups.replicas, streams_, alarm_.get())),
      near_(make_collectives(options.groups.near, streams_, alarm_.get())) {
  if (auto group = find_group(options.groups.control)) {
    control_ = std::make_unique<ControlChannel>(std::move(group), alarm_.get());
  }
  if (options.host_link) {
    host_link_ = std::make_unique<HostLink>(*options.host_link);
  }
  if (options.sharding.tiers.has_host_gradients()) {
    host_ = std::make_unique<HostStates>();
    streams_.add_copy_streams();
  }
  if (options.sharding.tiers.uses_disk()) {
    disk_ = std::make_unique<DiskStates>();
  }
  make_context(options.sharding);
  PlanOptions expected;
  expected.sharding = options.sharding;
  expected.mesh = context_.mesh;
  expected.sums_on_host = !streams_.has_streams();
  pool_.expect(plan_pool(plans_of(units), order, expected));
}

void Resources::make_context(const ShardOptions& sharding) {
  context_.mesh = UnitMesh::of(
      sharding,
      axis_of(shard_.get()),
      axis_of(replicas_.get()),
      !streams_.has_streams(),
      axis_of(near_.get()));
  context_.collectives = group_of(context_.mesh.state.name);
  context_.replicas = group_of(context_.mesh.replicas.name);
  context_.near = near_.get();
  context_.control = control_.get();
  context_.streams = &streams_;
  context_.pool = &pool_;
  context_.trace = &trace_;
  context_.host_link = host_link_.get();
  context_.by_rows = sharding.by_rows;
  context_.tiers = sharding.tiers;
  context_.host = host_.get();
  context_.disk = disk_.get();
}

Collectives* Resources::group_of(AxisName axis) const {
  return (axis == AxisName::State ? shard_ : axis == AxisName::Replicas ? replicas_ : near_).get();
}

} // namespace zerocore

// Makes the streams, memory pool, process groups and storage of a model.
#include "engine/resources.h"

#include <ATen/core/functional.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

#include "plan/memory_plan.h"

namespace zerocore {

namespace {

c10::intrusive_ptr<c10d::ProcessGroup> find_group(const std::optional<std::string>& name) {
  return name ? c10d::resolve_process_group(*name) : nullptr;
}

Axis axis_of(const Collectives* collectives) {
  return collectives == nullptr
      ? Axis{}
      : Axis{collectives->size(), collectives->rank(), collectives->methods()};
}

std::vector<std::string> names_of(const std::vector<UnitSpec>& units) {
  std::vector<std::string> names;
  for (const UnitSpec& unit : units) {
    for (const UnitParam& param : unit.params) {
      names.push_back(param.spec.fqn);
    }
  }
  return names;
}

// Makes the alarm that watches the collectives of the model's groups. Returns null if
// `stall_seconds` is 0, or if `alarm_name` is empty because peers are simulated.
std::shared_ptr<Alarm> make_alarm(const EngineOptions& engine, const std::vector<UnitSpec>& units) {
  if (engine.alarm_name.empty() || engine.stall_seconds == 0) {
    return nullptr;
  }
  AlarmOptions options{engine.alarm_name, 0, 1, engine.stall_seconds};
  if (const auto all = find_group(engine.control)) {
    options.rank = all->getRank();
    options.size = all->getSize();
  }
  std::vector<Alarm::Group> groups = {find_group(engine.control)};
  for (const GroupNames& mesh : engine.meshes) {
    for (const auto& name : {mesh.shard, mesh.replicas, mesh.reductions, mesh.near}) {
      groups.push_back(find_group(name));
    }
  }
  std::erase(groups, nullptr);
  if (groups.empty()) {
    return nullptr;
  }
  auto alarm = std::make_shared<Alarm>(options, groups, names_of(units));
  Watchdog::of_process().add(alarm);
  return alarm;
}

std::vector<UnitPlan> plans_of(const std::vector<UnitSpec>& units) {
  return c10::fmap(units, [](const UnitSpec& unit) {
    return UnitPlan{specs_of(unit.params), {}, unit.stays, unit.near, unit.mesh};
  });
}

} // namespace

Resources::Resources(
    const EngineOptions& options,
    c10::Device device,
    const std::vector<UnitSpec>& units,
    const Instructions& order)
    : streams_(device, options.log_hand_overs ? &hand_overs_ : nullptr),
      pool_(streams_),
      trace_(streams_),
      alarm_(make_alarm(options, units)) {
  for (const GroupNames& names : options.meshes) {
    groups_.emplace_back(names, streams_, alarm_.get(), options.sharding.sums_in_order);
  }
  if (auto group = find_group(options.control)) {
    control_ =
        std::make_unique<ControlChannel>(std::move(group), alarm_.get(), options.static_graph);
  }
  if (options.sharding.tiers.has_host_gradients()) {
    host_ = std::make_unique<HostStates>();
    streams_.add_copy_streams();
  }
  if (options.sharding.tiers.uses_disk()) {
    disk_ = std::make_unique<DiskStates>();
  }
  PlanOptions expected;
  expected.sharding = options.sharding;
  for (const MeshGroups& groups : groups_) {
    UnitContext context = make_context(groups, options.sharding);
    context.first_rank = options.meshes.at(contexts_.size()).first_rank;
    if (!contexts_.empty()) { // an expert's gradients come from the tokens of all ranks
      context.mesh.divisor = contexts_.front().mesh.divisor;
    }
    expected.meshes.push_back(context.mesh);
    contexts_.push_back(context);
  }
  if (options.registered && contexts_.front().collectives != nullptr) {
    register_memory();
  }
  expected.sums_on_host = !streams_.has_streams();
  pool_.expect(plan_pool(plans_of(units), order, expected));
}

void Resources::register_memory() {
  registered_.emplace(contexts_.front().collectives->backend(), streams_.device());
  if (registered_->is_offered()) {
    pool_.register_arena(*registered_);
    for (UnitContext& context : contexts_) {
      context.registered = &*registered_;
    }
  }
}

Resources::MeshGroups::MeshGroups(
    const GroupNames& names,
    const Streams& streams,
    Alarm* alarm,
    bool sums_in_order) {
  using Name = std::optional<std::string>;
  const auto make = [&](const Name& name, const Name& reductions, StreamRole reducing) {
    auto group = find_group(name);
    return group ? std::make_unique<Collectives>(
                       group, streams, alarm, find_group(reductions), sums_in_order, reducing)
                 : nullptr;
  };
  shard = make(names.shard, names.reductions, StreamRole::ReduceScatter);
  replicas = make(names.replicas, std::nullopt, StreamRole::Replicas);
  near = make(names.near, std::nullopt, StreamRole::ReduceScatter);
}

Collectives* Resources::MeshGroups::of(AxisName axis) const {
  return (axis == AxisName::State ? shard : axis == AxisName::Replicas ? replicas : near).get();
}

UnitContext Resources::make_context(const MeshGroups& groups, const ShardOptions& sharding) {
  UnitContext context;
  context.mesh = UnitMesh::of(
      sharding,
      axis_of(groups.shard.get()),
      axis_of(groups.replicas.get()),
      !streams_.has_streams(),
      axis_of(groups.near.get()));
  context.collectives = groups.of(context.mesh.state.name);
  context.replicas = groups.of(context.mesh.replicas.name);
  context.near = context.mesh.shards_across ? context.collectives : groups.near.get();
  context.control = control_.get();
  context.streams = &streams_;
  context.alarm = alarm_.get();
  context.pool = &pool_;
  context.trace = &trace_;
  context.by_rows = sharding.by_rows;
  context.tiers = sharding.tiers;
  context.host = host_.get();
  context.disk = disk_.get();
  return context;
}

} // namespace zerocore

// Wires the parts of an engine.
#include "engine/engine_parts.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <utility>

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

GroupCollectives make_groups(const GroupNames& names, const Streams& streams, Alarm* alarm) {
  return {
      make_collectives(names.shard, streams, alarm, names.reductions),
      make_collectives(names.replicas, streams, alarm),
      make_collectives(names.near, streams, alarm)};
}

std::unique_ptr<ControlChannel> make_control(const std::optional<std::string>& name, Alarm* alarm) {
  return name ? std::make_unique<ControlChannel>(c10d::resolve_process_group(*name), alarm)
              : nullptr;
}

Axis axis_of(const Collectives* collectives) {
  return collectives == nullptr
      ? Axis{}
      : Axis{collectives->size(), collectives->rank(), collectives->methods()};
}

UnitContext make_context(
    const ShardOptions& sharding,
    const GroupCollectives& groups,
    ControlChannel* control,
    Streams& streams,
    BucketPool& pool,
    Trace& trace,
    HostLink* host_link,
    HostStates* host,
    DiskStates* disk) {
  UnitContext context;
  context.mesh = UnitMesh::of(
      sharding,
      axis_of(groups.shard.get()),
      axis_of(groups.replicas.get()),
      !streams.has_streams(),
      axis_of(groups.near.get()));
  context.collectives = groups.of(context.mesh.state.name);
  context.replicas = groups.of(context.mesh.replicas.name);
  context.near = groups.near.get();
  context.control = control;
  context.streams = &streams;
  context.pool = &pool;
  context.trace = &trace;
  context.host_link = host_link;
  context.host = host;
  context.disk = disk;
  context.by_rows = sharding.by_rows;
  context.tiers = sharding.tiers;
  if (sharding.tiers.has_host_gradients()) {
    streams.add_copy_streams();
  }
  return context;
}

std::vector<bool> find_stays(const std::vector<UnitSpec>& specs) {
  std::vector<bool> stays;
  for (const UnitSpec& spec : specs) {
    stays.push_back(spec.stays);
  }
  return stays;
}

std::vector<std::unique_ptr<Unit>> make_units(
    std::vector<UnitSpec> specs,
    const UnitContext& context) {
  std::vector<std::unique_ptr<Unit>> units;
  for (UnitSpec& spec : specs) {
    const auto id = static_cast<UnitId>(units.size());
    UnitContext own = context;
    if (!spec.near) {
      own.mesh = own.mesh.without_near();
    }
    units.push_back(std::make_unique<Unit>(id, std::move(spec), own));
  }
  return units;
}

} // namespace

EngineParts::EngineParts(
    const EngineOptions& engine_options,
    c10::Device device,
    std::vector<UnitSpec> specs,
    std::vector<CallEvent> order,
    std::unique_ptr<Registrar> registrar_)
    : options(engine_options),
      streams(device, engine_options.log_hand_overs ? &hand_overs : nullptr),
      pool(streams),
      trace(streams),
      alarm(engine_options, specs),
      groups(make_groups(engine_options.groups, streams, alarm.get())),
      control(make_control(engine_options.groups.control, alarm.get())),
      host_link(
          engine_options.host_link ? std::make_unique<HostLink>(*engine_options.host_link)
                                   : nullptr),
      host(
          engine_options.sharding.tiers.has_host_gradients() ? std::make_unique<HostStates>()
                                                             : nullptr),
      disk(engine_options.sharding.tiers.uses_disk() ? std::make_unique<DiskStates>() : nullptr),
      context(make_context(
          engine_options.sharding,
          groups,
          control.get(),
          streams,
          pool,
          trace,
          host_link.get(),
          host.get(),
          disk.get())),
      stays(find_stays(specs)),
      units(make_units(std::move(specs), context)),
      offload(units, context, engine_options.host_threads),
      schedule(
          ScheduleOptions::of(
              static_cast<int>(units.size()),
              engine_options.sharding,
              context.mesh),
          std::move(order)),
      reducer(units, context, engine_options.sharding, offload),
      registrar(std::move(registrar_)),
      thread_check(/*backward_threads=*/device.type() != c10::DeviceType::CPU) {
  for (size_t unit = 0; unit < stays.size(); ++unit) {
    schedule.residency().set_staying(static_cast<UnitId>(unit), {stays[unit], false});
  }
  if (host != nullptr) {
    host->plan(units, context);
  }
  expect_step();
}

void EngineParts::open_disk(const DiskFolder& place) {
  TORCH_CHECK_VALUE(disk != nullptr, "nothing of this model is on disk");
  disk->open(place, units, context);
  if (context.tiers.states == Tier::Disk) {
    moments.emplace(units, context);
  }
}

void EngineParts::map_host_memory() {
  TORCH_CHECK_VALUE(host != nullptr, "nothing of this model is on the host");
  host->open();
  if (context.tiers.states == Tier::Host) {
    moments.emplace(units, context);
  }
}

std::vector<at::Tensor> EngineParts::make_moments(UnitId unit, int param) {
  if (!moments) {
    return {};
  }
  if (moments->had(unit, param)) {
    offload.wait_updates(); // they are set to zero
  }
  return moments->make(unit, param);
}

HostBytes EngineParts::host_bytes() const {
  HostBytes bytes;
  if (host != nullptr) {
    bytes.weights = host->layout().weights_nbytes();
    bytes.gradients = host->layout().gradients_nbytes();
    bytes.buffers = host->layout().gaps_nbytes();
  }
  if (disk != nullptr) {
    bytes.buffers += disk->buffers_nbytes();
    bytes.disk = disk->file_nbytes();
  }
  return bytes;
}

void EngineParts::mark_forked() {
  offload.mark_forked();
  if (disk != nullptr) {
    disk->mark_forked();
  }
  if (context.mesh.communicates()) {
    thread_check.mark_forked();
  }
}

// Places in the pool for what the first step is going to take from it.
void EngineParts::expect_step() {
  std::vector<UnitPlan> plans;
  for (const auto& unit : units) {
    const bool near = unit->context().mesh.gathers_near();
    plans.push_back({specs_of(unit->params()), {}, stays[unit->id()], near});
  }
  PlanOptions expected;
  expected.sharding = options.sharding;
  expected.mesh = context.mesh;
  expected.sums_on_host = !streams.has_streams();
  pool.expect(plan_pool(plans, schedule.order(), expected));
}

} // namespace zerocore

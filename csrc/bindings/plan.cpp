// Python bindings of the plan: layouts, calls and predictions.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/keyword_type.h"
#include "plan/memory_plan.h"

namespace py = pybind11;

template <>
struct py::detail::type_caster<zerocore::Tier> {
  PYBIND11_TYPE_CASTER(zerocore::Tier, const_name("str"));

  bool load(handle source, bool /*convert*/) {
    const auto name = str(source).cast<std::string>();
    value = name == "device" ? zerocore::Tier::Device
        : name == "cpu"      ? zerocore::Tier::Host
                             : zerocore::Tier::Disk;
    return value != zerocore::Tier::Disk || name == "disk";
  }
};

namespace zerocore {

namespace {

void register_layout(py::module_& module) {
  KeywordType<Range>(module, "Range")
      .needs("begin", &Range::begin)
      .needs("end", &Range::end)
      .def(py::self == py::self);
  py::class_<ElementType>(module, "ElementType")
      .def(py::init<int, int64_t>(), py::arg("dtype"), py::arg("itemsize"));
  KeywordType<ParamSpec>(module, "ParamSpec")
      .needs("fqn", &ParamSpec::fqn)
      .needs("shape", &ParamSpec::shape)
      .needs("dtype", &ParamSpec::dtype)
      .needs("itemsize", &ParamSpec::itemsize)
      .takes("requires_grad", &ParamSpec::requires_grad)
      .takes("main", &ParamSpec::main)
      .takes("reduce", &ParamSpec::reduce)
      .takes("grad", &ParamSpec::grad)
      .takes("gather", &ParamSpec::gather)
      .def_property_readonly("numel", &ParamSpec::numel);
  py::class_<Region>(module, "Region")
      .def_readonly("dtype", &Region::dtype)
      .def_readonly("itemsize", &Region::itemsize)
      .def_readonly("requires_grad", &Region::requires_grad)
      .def_readonly("is_gathered", &Region::is_gathered)
      .def_property_readonly("is_encoded", &Region::is_encoded)
      .def_readonly("shard_numel", &Region::shard_numel)
      .def_readonly("num_across", &Region::num_across)
      .def_readonly("params", &Region::params)
      .def_property_readonly("numel", &Region::numel)
      .def_property_readonly("nbytes", &Region::nbytes)
      .def_property_readonly("shard_nbytes", &Region::shard_nbytes);
  py::class_<ParamPlace>(module, "ParamPlace")
      .def_readonly("region", &ParamPlace::region)
      .def_readonly("offset", &ParamPlace::offset)
      .def_readonly("numel", &ParamPlace::numel);
  py::class_<Layout>(module, "Layout")
      .def_static(
          "build",
          &Layout::build,
          py::arg("params"),
          py::arg("num_shards"),
          py::arg("by_rows") = false,
          py::arg("num_across") = 1,
          py::arg("num_cuts") = 1)
      .def("of_shard", &Layout::of_shard)
      .def_property_readonly("regions", &Layout::regions)
      .def_property_readonly("places", &Layout::places)
      .def_property_readonly("num_shards", &Layout::num_shards)
      .def_property_readonly("by_rows", &Layout::by_rows)
      .def_property_readonly("copies_out", &Layout::copies_out)
      .def_property_readonly(
          "received_nbytes",
          [](const Layout& self) { return self.copies_out() ? self.encoded().nbytes() : 0; })
      .def_property_readonly("nbytes", &Layout::nbytes)
      .def_property_readonly("shard_nbytes", &Layout::shard_nbytes)
      .def_property_readonly("param_nbytes", &Layout::param_nbytes)
      .def("offset_in_shard", &Layout::offset_in_shard, py::arg("param"), py::arg("shard"))
      .def("owned", &Layout::owned, py::arg("param"), py::arg("shard"));
}

void register_call_events(py::module_& module) {
  py::class_<Instruction>(module, "CallEvent")
      .def(
          py::init([](bool enter, UnitId unit, bool needs_backward, bool reads) {
            const InstructionKind kind = enter ? InstructionKind::Enter : InstructionKind::Exit;
            return Instruction{
                .kind = kind, .unit = unit, .needs_backward = needs_backward, .reads = reads};
          }),
          py::arg("enter"),
          py::arg("unit"),
          py::arg("needs_backward") = true,
          py::arg("reads") = true)
      .def_property_readonly(
          "enter", [](const Instruction& event) { return event.kind == InstructionKind::Enter; })
      .def_readonly("unit", &Instruction::unit)
      .def_readonly("needs_backward", &Instruction::needs_backward)
      .def_readonly("reads", &Instruction::reads);
}

// A plan's options from Python: numbers of ranks instead of meshes.
struct PlannedRanks {
  PlanOptions options;
  int64_t world_size = 1; // ranks that share the state
  std::string backend = "nccl";
  int64_t num_replicas = 1;
  int64_t num_near = 1;
  int64_t rank = 0;
  // For each further mesh: ranks that share the state, replicas, and this rank's shard.
  std::vector<std::tuple<int64_t, int64_t, int64_t>> parts;
};

PlanOptions options_of(const PlannedRanks& ranks) {
  PlanOptions options = ranks.options;
  const ShardOptions& sharding = options.sharding;
  const auto axis = [&](int64_t size, int64_t rank) {
    return Axis{size, rank, WireMethods::of_backend(ranks.backend, size, sharding.sums_in_order)};
  };
  const auto add_mesh = [&](const Axis& state, const Axis& replicas, const Axis& near) {
    options.meshes.push_back(UnitMesh::of(sharding, state, replicas, options.sums_on_host, near));
  };
  add_mesh(
      axis(ranks.world_size, ranks.rank % ranks.world_size),
      axis(ranks.num_replicas, ranks.rank / ranks.world_size),
      axis(ranks.num_near, 0));
  for (const auto& [num_shards, num_replicas, shard] : ranks.parts) {
    add_mesh(axis(num_shards, shard), axis(num_replicas, 0), {});
  }
  return options;
}

void register_options(py::module_& module) {
  py::class_<HostBytes>(module, "HostBytes")
      .def_readonly("weights", &HostBytes::weights)
      .def_readonly("gradients", &HostBytes::gradients)
      .def_readonly("optimizer", &HostBytes::optimizer)
      .def_readonly("buffers", &HostBytes::buffers)
      .def_readonly("disk", &HostBytes::disk)
      .def_property_readonly("total", &HostBytes::total);
  py::class_<MemoryPlan>(module, "MemoryPlan")
      .def_readonly("parameters", &MemoryPlan::parameters)
      .def_readonly("main_weights", &MemoryPlan::main_weights)
      .def_readonly("gradients", &MemoryPlan::gradients)
      .def_readonly("optimizer", &MemoryPlan::optimizer)
      .def_readonly("pool", &MemoryPlan::pool)
      .def_readonly("pool_reserved", &MemoryPlan::pool_reserved)
      .def_readonly("host", &MemoryPlan::host)
      .def_property_readonly("total", &MemoryPlan::total);
  KeywordType<ShardOptions>(module, "ShardOptions")
      .needs("stage", &ShardOptions::stage)
      .takes("prefetch", &ShardOptions::prefetch)
      .takes("reductions", &ShardOptions::reductions)
      .takes("hold_full", &ShardOptions::hold_full)
      .takes("by_rows", &ShardOptions::by_rows)
      .takes("shard_across", &ShardOptions::shard_across)
      .takes("retain_last", &ShardOptions::retain_last)
      .takes("sums_in_order", &ShardOptions::sums_in_order)
      .takes("states", &ShardOptions::tiers, &Tiers::states)
      .takes("gradients", &ShardOptions::tiers, &Tiers::gradients)
      .takes("parameters", &ShardOptions::tiers, &Tiers::parameters);
  using Ranks = PlannedRanks;
  KeywordType<PlanOptions, Ranks>(module, "PlanOptions", &options_of)
      .needs("sharding", &Ranks::options, &PlanOptions::sharding)
      .needs("world_size", &Ranks::world_size)
      .takes("backend", &Ranks::backend)
      .takes("micro_batches", &Ranks::options, &PlanOptions::micro_batches)
      .takes("num_replicas", &Ranks::num_replicas)
      .takes("num_near", &Ranks::num_near)
      .takes("rank", &Ranks::rank)
      .takes("parts", &Ranks::parts)
      .takes("sums_on_host", &Ranks::options, &PlanOptions::sums_on_host)
      .takes("first_order", &Ranks::options, &PlanOptions::first_order)
      .takes("backward", &Ranks::options, &PlanOptions::backward);
}

void register_units(py::module_& module) {
  KeywordType<UnitPlan>(module, "UnitPlan")
      .needs("params", &UnitPlan::params)
      .takes("unused", &UnitPlan::unused)
      .takes("stays", &UnitPlan::stays)
      .takes("near", &UnitPlan::near)
      .takes("mesh", &UnitPlan::mesh);
  py::class_<BackwardEvent>(module, "BackwardEvent")
      .def(py::init<bool, int32_t>(), py::arg("ready"), py::arg("index"))
      .def(py::self == py::self);
  py::class_<PlannedEvent>(module, "PlannedEvent")
      .def_property_readonly("op", [](const PlannedEvent& e) { return trace_op_name(e.op); })
      .def_readonly("unit", &PlannedEvent::unit)
      .def_readonly("nbytes", &PlannedEvent::nbytes)
      .def_readonly("pool_nbytes", &PlannedEvent::pool_nbytes)
      .def_readonly("moment", &PlannedEvent::moment)
      .def_property_readonly("axis", [](const PlannedEvent& e) { return axis_name(e.axis); })
      .def_readonly("num_ranks", &PlannedEvent::num_ranks)
      .def(py::self == py::self);
}

} // namespace

void register_plan(py::module_& module) {
  register_layout(module);
  register_call_events(module);
  register_units(module);
  register_options(module);
  module.def("plan_layouts", &plan_layouts, py::arg("units"), py::arg("options"));
  module.def("plan_events", &plan_events, py::arg("units"), py::arg("order"), py::arg("options"));
  module.def(
      "plan_memory",
      &plan_memory,
      py::arg("units"),
      py::arg("order"),
      py::arg("options"),
      py::kw_only(),
      py::arg("optimizer_states"));
}

} // namespace zerocore

// Python face of the plan layer: layouts, calls and predictions.
#include <pybind11/operators.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "plan/memory_plan.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// Ranks that share the state, replicas, and which shard this rank has.
using PlannedMesh = std::tuple<int64_t, int64_t, int64_t>;

void register_layout(py::module_& module) {
  py::class_<Range>(module, "Range")
      .def(py::init<int64_t, int64_t>(), py::arg("begin"), py::arg("end"))
      .def(py::self == py::self)
      .def_readonly("begin", &Range::begin)
      .def_readonly("end", &Range::end);
  py::class_<ElementType>(module, "ElementType")
      .def(py::init<int, int64_t>(), py::arg("dtype"), py::arg("itemsize"));
  py::class_<ParamSpec>(module, "ParamSpec")
      .def(
          py::init<
              std::string,
              std::vector<int64_t>,
              int,
              int64_t,
              bool,
              ElementType,
              ElementType,
              ElementType,
              ElementType>(),
          py::arg("fqn"),
          py::arg("shape"),
          py::arg("dtype"),
          py::arg("itemsize"),
          py::arg("requires_grad") = true,
          py::arg("main") = ElementType(),
          py::arg("reduce") = ElementType(),
          py::arg("grad") = ElementType(),
          py::arg("gather") = ElementType())
      .def_readonly("fqn", &ParamSpec::fqn)
      .def_readonly("shape", &ParamSpec::shape)
      .def_readonly("requires_grad", &ParamSpec::requires_grad)
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
            return Instruction{kind, unit, needs_backward, -1, reads};
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

Tier tier_of(const std::string& place) {
  return place == "device" ? Tier::Device : place == "cpu" ? Tier::Host : Tier::Disk;
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
  py::class_<ShardOptions>(module, "ShardOptions")
      .def(
          py::init([](int64_t stage,
                      int prefetch,
                      int reductions,
                      bool hold_full,
                      bool by_rows,
                      bool shard_across,
                      bool retain_last,
                      bool sums_in_order,
                      const std::string& states,
                      const std::string& gradients,
                      const std::string& parameters) {
            const Tiers tiers{tier_of(states), tier_of(gradients), tier_of(parameters)};
            return ShardOptions{
                stage,
                prefetch,
                reductions,
                hold_full,
                by_rows,
                shard_across,
                sums_in_order,
                retain_last,
                tiers};
          }),
          py::kw_only(),
          py::arg("stage"),
          py::arg("prefetch") = 1,
          py::arg("reductions") = 1,
          py::arg("hold_full") = false,
          py::arg("by_rows") = false,
          py::arg("shard_across") = false,
          py::arg("retain_last") = true,
          py::arg("sums_in_order") = false,
          py::arg("states") = "device",
          py::arg("gradients") = "device",
          py::arg("parameters") = "device");
  py::class_<PlanOptions>(module, "PlanOptions")
      .def(
          py::init([](const ShardOptions& sharding,
                      int64_t world_size,
                      const std::string& backend,
                      int micro_batches,
                      int64_t num_replicas,
                      int64_t num_near,
                      int64_t rank,
                      const std::vector<PlannedMesh>& parts,
                      bool sums_on_host,
                      Instructions first_order,
                      std::vector<BackwardEvent> backward) {
            const auto axis = [&](int64_t size, int64_t rank_in_it) {
              return Axis{
                  size, rank_in_it, WireMethods::of_backend(backend, size, sharding.sums_in_order)};
            };
            const Axis state = axis(world_size, rank % world_size);
            const Axis replicas = axis(num_replicas, rank / world_size);
            const Axis near = axis(num_near, 0);
            std::vector<UnitMesh> meshes = {
                UnitMesh::of(sharding, state, replicas, sums_on_host, near)};
            for (const auto& [num_shards, replicas, shard] : parts) {
              meshes.push_back(
                  UnitMesh::of(sharding, axis(num_shards, shard), axis(replicas, 0), sums_on_host));
            }
            return PlanOptions{
                sharding,
                std::move(meshes),
                micro_batches,
                sums_on_host,
                std::move(first_order),
                std::move(backward)};
          }),
          py::arg("sharding"),
          py::kw_only(),
          py::arg("world_size"),
          py::arg("backend") = "nccl",
          py::arg("micro_batches") = 1,
          py::arg("num_replicas") = 1,
          py::arg("num_near") = 1,
          py::arg("rank") = 0,
          py::arg("parts") = std::vector<PlannedMesh>{},
          py::arg("sums_on_host") = false,
          py::arg("first_order") = Instructions{},
          py::arg("backward") = std::vector<BackwardEvent>{});
}

void register_units(py::module_& module) {
  py::class_<UnitPlan>(module, "UnitPlan")
      .def(
          py::init<std::vector<ParamSpec>, std::vector<int>, bool, bool, int>(),
          py::arg("params"),
          py::arg("unused") = std::vector<int>{},
          py::arg("stays") = false,
          py::arg("near") = true,
          py::arg("mesh") = 0);
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

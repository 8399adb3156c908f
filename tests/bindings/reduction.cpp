// Reductions: a list of what would be done, with no tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "plan/reduction.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

// A step, and for a Pack the elements of each parameter of the region that are added to.
struct RecordedStep {
  Step step;
  std::vector<Range> added;
};

const char* kind_name(const Step& step) {
  constexpr const char* kKinds[] = {"take", "free", "order", "", "start", "wait", "ready", "count"};
  constexpr const char* kMoves[] = {
      "copy", "copy out", "encode", "keep", "pack", "cast", "sum", "zero"};
  return step.kind == StepKind::Move ? kMoves[static_cast<size_t>(step.how)]
                                     : kKinds[static_cast<size_t>(step.kind)];
}

const char* memory_name(Memory memory) {
  constexpr const char* kNames[] = {
      "shard",
      "main",
      "sent",
      "exp_avg",
      "exp_avg_sq",
      "full parameters",
      "received",
      "near",
      "kept",
      "full",
      "wire",
      "scratch",
      "sums",
      "across"};
  return kNames[static_cast<size_t>(memory)];
}

const char* scale_name(ScalePart part) {
  constexpr const char* kNames[] = {"none", "all", "packed", "rest", "rest undone"};
  return kNames[static_cast<size_t>(part)];
}

struct PyReductionOptions {
  ReductionOptions options;
  UnitMesh mesh;
};

// A reduction whose steps are only written down.
struct PyReduction final : Steps {
  PyReduction(const PyReductionOptions& options, std::vector<Layout> layouts_)
      : layouts(std::move(layouts_)), reduction(options.options, units_over(options.mesh)) {}

  void run(const Step& step) override {
    RecordedStep recorded{step, {}};
    if (step.kind == StepKind::Move && step.how == How::Pack) {
      for (const int param : layouts[step.unit].regions()[step.region].params) {
        recorded.added.push_back(reduction.added(step, param));
      }
    }
    steps.push_back(std::move(recorded));
  }
  std::vector<RecordedStep> take() {
    return std::exchange(steps, {});
  }
  std::vector<ReducedUnit> units_over(const UnitMesh& mesh) const {
    std::vector<ReducedUnit> result;
    for (const Layout& layout : layouts) {
      result.push_back({&layout, mesh});
    }
    return result;
  }

  std::vector<Layout> layouts;
  Reduction reduction;
  std::vector<RecordedStep> steps;
};

PyReductionOptions make_options(
    const ShardOptions& sharding,
    int64_t world_size,
    int64_t num_replicas,
    const std::string& backend,
    bool on_host,
    int64_t rank) {
  const auto axis = [&](int64_t size, int64_t rank_in_it) {
    return Axis{size, rank_in_it, WireMethods::of_backend(backend, size, sharding.sums_in_order)};
  };
  const Axis state = axis(world_size, rank % world_size);
  const Axis replicas = axis(num_replicas, rank / world_size);
  return {{sharding, on_host}, UnitMesh::of(sharding, state, replicas, on_host)};
}

void register_step(py::module_& module) {
  using R = RecordedStep;
  py::class_<R>(module, "Step")
      .def_property_readonly("kind", [](const R& r) { return kind_name(r.step); })
      .def_property_readonly("unit", [](const R& r) { return r.step.unit; })
      .def_property_readonly("region", [](const R& r) { return r.step.region; })
      .def_property_readonly("source", [](const R& r) { return memory_name(r.step.from); })
      .def_property_readonly("target", [](const R& r) { return memory_name(r.step.to); })
      .def_property_readonly("nbytes", [](const R& r) { return r.step.nbytes; })
      .def_property_readonly("parts", [](const R& r) { return r.step.parts; })
      .def_property_readonly("adds", [](const R& r) { return r.step.adds; })
      .def_property_readonly("param", [](const R& r) { return r.step.param; })
      .def_property_readonly(
          "op", [](const R& r) { return r.step.op ? trace_op_name(*r.step.op) : ""; })
      .def_property_readonly("scale", [](const R& r) { return scale_name(r.step.scale); })
      .def_property_readonly("axis", [](const R& r) { return axis_name(r.step.axis); })
      .def_property_readonly("stream", [](const R& r) { return stream_role_name(r.step.stream); })
      .def_readonly("added", &R::added);
}

} // namespace

void register_reduction(py::module_& module) {
  register_step(module);
  py::class_<PyReductionOptions>(module, "ReductionOptions")
      .def(
          py::init(&make_options),
          py::arg("sharding"),
          py::kw_only(),
          py::arg("world_size"),
          py::arg("num_replicas") = 1,
          py::arg("backend") = "nccl",
          py::arg("on_host") = false,
          py::arg("rank") = 0);
  using R = PyReduction;
  py::class_<R>(module, "Reduction")
      .def(
          py::init([](const PyReductionOptions& options, std::vector<Layout> layouts) {
            return std::make_unique<PyReduction>(options, std::move(layouts));
          }),
          py::arg("options"),
          py::arg("layouts"))
      .def(
          "reduce",
          [](R& r, UnitId unit, bool sync) {
            r.reduction.reduce(unit, sync, r);
            return r.take();
          },
          py::arg("unit"),
          py::arg("sync") = true)
      .def(
          "finish",
          [](R& r) {
            r.reduction.finish(r);
            return r.take();
          })
      .def(
          "reset",
          [](R& r) {
            r.reduction.reset(r);
            return r.take();
          })
      .def(
          "set_trainable",
          [](R& r, UnitId unit, int region, bool trainable) {
            r.reduction.set_trainable(unit, region, trainable);
          })
      .def("drop", [](R& r, UnitId unit, int param) { r.reduction.drop(unit, param); })
      .def(
          "is_valid",
          [](const R& r, UnitId unit, int param) { return r.reduction.is_valid(unit, param); })
      .def("kept_nbytes", [](const R& r, UnitId unit) { return r.reduction.kept_nbytes(unit); });
}

} // namespace zerocore

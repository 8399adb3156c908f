// Python face of the values that go into an engine and come out of it, each with named fields.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/registrar.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace zerocore {

namespace {

ElementType element_of(at::ScalarType dtype) {
  return {static_cast<int>(dtype), static_cast<int64_t>(c10::elementSize(dtype))};
}

UnitParam make_param(
    std::string fqn,
    const at::Tensor& like,
    at::ScalarType main,
    at::ScalarType reduce,
    at::ScalarType grad,
    bool lacks_main,
    bool is_gathered,
    bool is_kept,
    std::optional<at::ScalarType> gather) {
  UnitParam param;
  param.spec.is_gathered = is_gathered;
  param.spec.is_kept = is_kept;
  param.lacks_main = lacks_main;
  param.spec.main = element_of(main);
  param.spec.reduce = element_of(reduce);
  param.spec.grad = element_of(grad);
  param.spec.gather = gather ? element_of(*gather) : ElementType();
  param.spec.fqn = std::move(fqn);
  param.spec.shape = like.sizes().vec();
  param.spec.dtype = static_cast<int>(like.scalar_type());
  param.spec.itemsize = static_cast<int64_t>(like.itemsize());
  param.spec.requires_grad = like.requires_grad();
  // Strides that skip or repeat memory are not kept: the buffer is dense.
  param.strides = like.is_non_overlapping_and_dense()
      ? like.strides().vec()
      : c10::TensorType::contiguousStridesOf(like.sizes());
  return param;
}

void register_engine_options(py::module_& module) {
  using Name = std::optional<std::string>;
  py::class_<GroupNames>(module, "GroupNames")
      .def(
          py::init<Name, Name, Name, Name, int64_t>(),
          py::kw_only(),
          py::arg("shard"),
          py::arg("replicas"),
          py::arg("near"),
          py::arg("reductions") = py::none(),
          py::arg("first_rank") = 0);
  py::class_<EngineOptions>(module, "EngineOptions")
      .def(
          py::init<
              ShardOptions,
              std::vector<GroupNames>,
              Name,
              bool,
              bool,
              bool,
              std::string,
              std::optional<double>,
              int>(),
          py::kw_only(),
          py::arg("sharding"),
          py::arg("meshes"),
          py::arg("control"),
          py::arg("log_hand_overs") = false,
          py::arg("static_graph") = false,
          py::arg("registered") = false,
          py::arg("alarm_name") = "",
          py::arg("stall_seconds") = 0.0,
          py::arg("host_threads") = 1);
}

void register_units(py::module_& module) {
  py::class_<UnitParam>(module, "UnitParam")
      .def(
          py::init(&make_param),
          py::arg("fqn"),
          py::arg("like"),
          py::kw_only(),
          py::arg("main"),
          py::arg("reduce"),
          py::arg("grad"),
          py::arg("lacks_main"),
          py::arg("is_gathered") = true,
          py::arg("is_kept") = true,
          py::arg("gather") = py::none());
  py::class_<UnitSpec>(module, "UnitSpec")
      .def(
          py::init<std::string, std::vector<UnitParam>, bool, bool, int>(),
          py::arg("name"),
          py::arg("params"),
          py::arg("stays") = false,
          py::arg("near") = true,
          py::arg("mesh") = 0);
  py::class_<UpdatedUnit>(module, "UpdatedUnit")
      .def(
          py::init<UnitId, std::optional<std::vector<int>>>(),
          py::arg("unit"),
          py::arg("params") = py::none());
}

void register_host_update(py::module_& module) {
  using Tensors = std::vector<at::Tensor>;
  py::class_<HostUpdate>(module, "HostUpdate")
      .def(
          py::init([](UnitId unit,
                      std::vector<int> params,
                      Tensors weights,
                      Tensors grads,
                      Tensors exp_avgs,
                      Tensors exp_avg_sqs,
                      Tensors steps,
                      Tensors model_weights,
                      std::vector<std::pair<at::Tensor, at::Tensor>> casts,
                      double lr,
                      double beta1,
                      double beta2,
                      double eps,
                      double weight_decay,
                      bool maximize,
                      std::optional<at::Tensor> grad_scale,
                      std::optional<at::Tensor> found_inf) {
            return HostUpdate{
                unit,
                std::move(params),
                std::move(weights),
                std::move(grads),
                std::move(exp_avgs),
                std::move(exp_avg_sqs),
                std::move(steps),
                std::move(model_weights),
                {lr, beta1, beta2, eps, weight_decay, maximize},
                {std::nullopt, std::move(grad_scale), std::move(found_inf)},
                std::move(casts)};
          }),
          py::arg("unit"),
          py::arg("params"),
          py::arg("weights"),
          py::arg("grads"),
          py::arg("exp_avgs"),
          py::arg("exp_avg_sqs"),
          py::arg("steps"),
          py::arg("model_weights"),
          py::arg("casts"),
          py::kw_only(),
          py::arg("lr"),
          py::arg("beta1"),
          py::arg("beta2"),
          py::arg("eps"),
          py::arg("weight_decay"),
          py::arg("maximize"),
          py::arg("grad_scale"),
          py::arg("found_inf"));
}

void register_figures_of_engine(py::module_& module) {
  py::class_<TraceRecord>(module, "TraceRecord")
      .def_property_readonly("op", [](const TraceRecord& r) { return trace_op_name(r.op); })
      .def_readonly("unit", &TraceRecord::unit)
      .def_readonly("nbytes", &TraceRecord::nbytes)
      .def_readonly("pool_nbytes", &TraceRecord::pool_nbytes)
      .def_readonly("issued_ns", &TraceRecord::issued_ns)
      .def_readonly("done_ns", &TraceRecord::done_ns)
      .def_readonly("wait_ns", &TraceRecord::wait_ns);
  py::class_<OpCounter>(module, "OpCounter")
      .def_readonly("count", &OpCounter::count)
      .def_readonly("nbytes", &OpCounter::nbytes);
}

const char* kind_name(HandOverKind kind) {
  constexpr const char* kNames[] = {"record", "wait", "read", "write"};
  return kNames[static_cast<size_t>(kind)];
}

std::string stream_name(StreamRole role, int compute) {
  const std::string name = stream_role_name(role);
  return role == StreamRole::Compute && compute > 0 ? name + " " + std::to_string(compute) : name;
}

void register_hand_overs(py::module_& module) {
  module.def("set_logged_compute_stream", &HandOverLog::set_compute_stream, py::arg("stream"));
  py::class_<HandOver>(module, "HandOver")
      .def_property_readonly("kind", [](const HandOver& h) { return kind_name(h.kind); })
      .def_property_readonly(
          "stream", [](const HandOver& h) { return stream_name(h.role, h.compute); })
      .def_property_readonly(
          "source", [](const HandOver& h) { return stream_name(h.source, h.source_compute); })
      .def_readonly("event", &HandOver::event)
      .def_readonly("begin", &HandOver::begin)
      .def_readonly("end", &HandOver::end)
      .def_readonly("what", &HandOver::what)
      .def_readonly("unit", &HandOver::unit);
}

} // namespace

void register_engine_types(py::module_& module) {
  register_engine_options(module);
  register_units(module);
  register_host_update(module);
  register_figures_of_engine(module);
  register_hand_overs(module);
}

} // namespace zerocore

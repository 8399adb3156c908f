// Python bindings of the arguments and results of an engine.
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/keyword_type.h"
#include "bindings/py_engine.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace zerocore {

namespace {

ElementType element_of(at::ScalarType dtype) {
  return {static_cast<int>(dtype), static_cast<int64_t>(c10::elementSize(dtype))};
}

// A parameter as Python gives it.
struct LikeParam {
  at::Tensor like;
  at::ScalarType main = at::kFloat, reduce = at::kFloat, grad = at::kFloat;
  std::optional<at::ScalarType> gather;
  UnitParam param;
};

UnitParam param_of(const LikeParam& given) {
  const at::Tensor& like = given.like;
  UnitParam param = given.param;
  param.spec.main = element_of(given.main);
  param.spec.reduce = element_of(given.reduce);
  param.spec.grad = element_of(given.grad);
  param.spec.gather = given.gather ? element_of(*given.gather) : ElementType();
  param.spec.shape = like.sizes().vec();
  param.spec.dtype = static_cast<int>(like.scalar_type());
  param.spec.itemsize = static_cast<int64_t>(like.itemsize());
  param.spec.requires_grad = like.requires_grad();
  // The buffer is dense: strides that skip or repeat memory are not kept.
  param.strides = like.is_non_overlapping_and_dense()
      ? like.strides().vec()
      : c10::TensorType::contiguousStridesOf(like.sizes());
  return param;
}

void register_engine_options(py::module_& module) {
  KeywordType<GroupNames>(module, "GroupNames")
      .needs("shard", &GroupNames::shard)
      .needs("replicas", &GroupNames::replicas)
      .needs("near", &GroupNames::near)
      .takes("reductions", &GroupNames::reductions)
      .takes("first_rank", &GroupNames::first_rank);
  KeywordType<EngineOptions>(module, "EngineOptions")
      .needs("sharding", &EngineOptions::sharding)
      .needs("meshes", &EngineOptions::meshes)
      .needs("control", &EngineOptions::control)
      .takes("log_hand_overs", &EngineOptions::log_hand_overs)
      .takes("static_graph", &EngineOptions::static_graph)
      .takes("registered", &EngineOptions::registered)
      .takes("alarm_name", &EngineOptions::alarm_name)
      .takes("stall_seconds", &EngineOptions::stall_seconds)
      .takes("host_threads", &EngineOptions::host_threads);
}

void register_units(py::module_& module) {
  KeywordType<UnitParam, LikeParam>(module, "UnitParam", &param_of)
      .needs("fqn", &LikeParam::param, &UnitParam::spec, &ParamSpec::fqn)
      .needs("like", &LikeParam::like)
      .needs("main", &LikeParam::main)
      .needs("reduce", &LikeParam::reduce)
      .needs("grad", &LikeParam::grad)
      .needs("lacks_main", &LikeParam::param, &UnitParam::lacks_main)
      .takes("is_gathered", &LikeParam::param, &UnitParam::spec, &ParamSpec::is_gathered)
      .takes("is_kept", &LikeParam::param, &UnitParam::spec, &ParamSpec::is_kept)
      .takes("gather", &LikeParam::gather);
  KeywordType<UnitSpec>(module, "UnitSpec")
      .needs("name", &UnitSpec::name)
      .needs("params", &UnitSpec::params)
      .takes("stays", &UnitSpec::stays)
      .takes("near", &UnitSpec::near)
      .takes("mesh", &UnitSpec::mesh);
  KeywordType<UpdatedUnit>(module, "UpdatedUnit")
      .needs("unit", &UpdatedUnit::unit)
      .takes("params", &UpdatedUnit::params);
}

void register_host_update(py::module_& module) {
  using Options = kernels::AdamWOptions;
  using Scalars = kernels::AdamWScalarTensors;
  KeywordType<HostUpdate>(module, "HostUpdate")
      .needs("unit", &HostUpdate::unit)
      .needs("params", &HostUpdate::params)
      .needs("weights", &HostUpdate::weights)
      .needs("grads", &HostUpdate::grads)
      .needs("exp_avgs", &HostUpdate::exp_avgs)
      .needs("exp_avg_sqs", &HostUpdate::exp_avg_sqs)
      .needs("steps", &HostUpdate::steps)
      .needs("model_weights", &HostUpdate::model_weights)
      .needs("casts", &HostUpdate::casts)
      .needs("lr", &HostUpdate::options, &Options::lr)
      .needs("beta1", &HostUpdate::options, &Options::beta1)
      .needs("beta2", &HostUpdate::options, &Options::beta2)
      .needs("eps", &HostUpdate::options, &Options::eps)
      .needs("weight_decay", &HostUpdate::options, &Options::weight_decay)
      .needs("maximize", &HostUpdate::options, &Options::maximize)
      .needs("grad_scale", &HostUpdate::scalars, &Scalars::grad_scale)
      .needs("found_inf", &HostUpdate::scalars, &Scalars::found_inf);
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

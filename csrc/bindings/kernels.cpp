// Python face of the kernels layer: what this build has, and its index arithmetic for tests. The
// kernels themselves are operators, torch.ops.zerocore.*.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <vector>

#include "bindings/bindings.h"
#include "common/types.h"
#include "kernels/loops.h"

namespace py = pybind11;

namespace zerocore {

namespace {

using kernels::SegmentList;

struct SegmentChunk {
  int segment;
  Range elements;
};

// Every chunk of segments with these sizes, in order. Sources and destinations are never touched.
std::vector<SegmentChunk> chunks(const std::vector<int64_t>& numels) {
  SegmentList list;
  for (const int64_t numel : numels) {
    list.push(nullptr, nullptr, numel);
  }
  std::vector<SegmentChunk> result;
  for (int64_t chunk = 0; chunk < list.num_chunks(); ++chunk) {
    const auto first_chunk = [&](int i) { return list[i].first_chunk; };
    const int index = kernels::find_segment(first_chunk, list.size(), chunk);
    const auto span = kernels::chunk_span(list[index].numel, chunk - list[index].first_chunk);
    result.push_back({index, {span.begin, span.end}});
  }
  return result;
}

kernels::VectorSplit vector_split(
    uintptr_t dst,
    int dst_itemsize,
    uintptr_t src,
    int src_itemsize,
    int64_t numel) {
  return kernels::split_vectors(dst, dst_itemsize, src, src_itemsize, numel);
}

} // namespace

void register_kernels(py::module_& module) {
  module.attr("CHUNK_NUMEL") = kernels::kChunkNumel;
  module.attr("HAS_CUDA_KERNELS") = kernels::has_loops(c10::DeviceType::CUDA);
  py::class_<SegmentChunk>(module, "SegmentChunk")
      .def_readonly("segment", &SegmentChunk::segment)
      .def_readonly("elements", &SegmentChunk::elements);
  module.def("kernel_chunks", &chunks, py::arg("numels"));
  py::class_<kernels::VectorSplit>(module, "VectorSplit")
      .def_readonly("head", &kernels::VectorSplit::head)
      .def_readonly("num_vectors", &kernels::VectorSplit::num_vectors);
  module.def(
      "kernel_vector_split",
      &vector_split,
      py::arg("dst"),
      py::arg("dst_itemsize"),
      py::arg("src"),
      py::arg("src_itemsize"),
      py::arg("numel"));
}

} // namespace zerocore

// Index arithmetic of kernels, and the checksum that processors without products compute.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <tuple>
#include <vector>

#include "common/types.h"
#include "io/crc32.h"
#include "kernels/segment_list.h"
#include "plan/layout.h"
#include "testing.h"

namespace py = pybind11;

namespace zerocore {

namespace {

using kernels::SegmentList;

struct SegmentChunk {
  int segment;
  Range elements;
};

// Every chunk of segments with these sizes, in order. Sources and destinations are never touched.
std::vector<SegmentChunk> chunks(const std::vector<int64_t>& numels, int64_t chunk_numel) {
  SegmentList list(chunk_numel);
  for (const int64_t numel : numels) {
    list.push({.numel = numel});
  }
  std::vector<SegmentChunk> result;
  for (int64_t chunk = 0; chunk < list.num_chunks(); ++chunk) {
    const auto first_chunk = [&](int i) { return list[i].first_chunk; };
    const int index = kernels::find_segment(first_chunk, list.size(), chunk);
    const auto span =
        kernels::chunk_span(list[index].numel, chunk - list[index].first_chunk, list.chunk_numel());
    result.push_back({index, {span.begin, span.end}});
  }
  return result;
}

// The same of one segment in runs; each chunk's segment is the number of its run.
std::vector<SegmentChunk> run_chunks(int64_t numel, int64_t run, int64_t chunk_numel) {
  SegmentList list(chunk_numel);
  list.push({.numel = numel, .run = run});
  std::vector<SegmentChunk> result;
  for (int64_t chunk = 0; chunk < list.num_chunks(); ++chunk) {
    const auto [number, span] = kernels::run_span(numel, run, chunk, chunk_numel);
    result.push_back({static_cast<int>(number), {span.begin, span.end}});
  }
  return result;
}

using Runs = std::tuple<int64_t, int64_t, int64_t, int64_t>;

// Begin, numel, run and stride of each parameter of a region, and of each gap.
std::pair<std::vector<Runs>, std::vector<Runs>> wire_runs(const Layout& layout, int region) {
  const auto values = [](const WireRuns& runs) {
    return Runs{runs.begin, runs.numel, runs.run, runs.stride};
  };
  std::pair<std::vector<Runs>, std::vector<Runs>> found;
  for (const int param : layout.regions().at(region).params) {
    found.first.push_back(values(layout.wire_runs(param)));
  }
  for (const WireRuns& gap : layout.wire_gaps(region)) {
    found.second.push_back(values(gap));
  }
  return found;
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
  py::class_<SegmentChunk>(module, "SegmentChunk")
      .def_readonly("segment", &SegmentChunk::segment)
      .def_readonly("elements", &SegmentChunk::elements);
  module.def("kernel_chunks", &chunks, py::arg("numels"), py::arg("chunk_numel"));
  module.def(
      "kernel_run_chunks", &run_chunks, py::arg("numel"), py::arg("run"), py::arg("chunk_numel"));
  module.def("wire_runs", &wire_runs, py::arg("layout"), py::arg("region"));
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
  module.def("crc32_by_tables", [](const py::buffer& data, uint32_t crc) {
    const py::buffer_info bytes = data.request();
    return io::crc32_by_tables(crc, bytes.ptr, bytes.size * bytes.itemsize);
  });
}

} // namespace zerocore

// The kernels on tensors: each function checks its arguments, then runs the device's loops.
//
// Every call reads or writes the memory once. On CUDA it is one launch on the current stream for up
// to about a thousand tensors (a few more launches beyond), and the host does not wait for the
// device. Values are scaled and summed in float, for float64 in double. Casts are possible among
// float32, float16 and bfloat16. Wrong arguments throw c10::ValueError or c10::TypeError.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace zerocore::kernels {

// On one side of a copy, elements are contiguous. On the other side they form runs of `numel`
// elements, `stride` apart; 0 means a single run. See Note [Rows].
struct Runs {
  int64_t numel = 0;
  int64_t stride = 0;
};

// A segment of a bucket to fill from `source`. Without a source the segment is zeroed; with `add`
// it keeps its values instead.
struct PackSegment {
  const at::Tensor* source = nullptr; // dense; read in the order of its storage
  int64_t source_offset = 0; // elements
  int64_t offset = 0; // elements in the bucket
  int64_t numel = 0;
  bool add = false; // adds to the bucket's values
  Runs runs = {}; // runs in the bucket
};

// bucket[segment] = or += source * scale, for every segment. `bucket` is 1-D of a floating dtype;
// sources are of one dtype, on its device. Segments must not overlap.
void pack(const at::Tensor& bucket, const std::vector<PackSegment>& segments, double scale);

// Elements [from, from + numel) of a source, to copy to `to` in a target.
struct Piece {
  int64_t from = 0;
  int64_t to = 0;
  int64_t numel = 0;
  Runs runs = {}; // runs in the source
};

// to[piece] = from[piece], for every piece. Both are 1-D, of one dtype and on one device; pieces
// must not overlap in `to`.
void copy_pieces(const at::Tensor& to, const at::Tensor& from, const std::vector<Piece>& pieces);

// Encodes `source` into `blocks`, see Note [Scaled blocks]. Both are 1-D. The source fills whole
// blocks, and `blocks` are scaled_nbytes() of its elements. `format`: float8_e4m3fn or int8.
void encode(const at::Tensor& blocks, const at::Tensor& source, c10::ScalarType format);

// to[piece] = blocks[piece], decoded; `from` counts elements.
void decode(
    const at::Tensor& to,
    const at::Tensor& blocks,
    const std::vector<Piece>& pieces,
    c10::ScalarType format);

// out = [out +] scale * (sum of the `num_chunks` equal parts of `chunks`). Both are 1-D.
void accumulate(
    const at::Tensor& out,
    const at::Tensor& chunks,
    int64_t num_chunks,
    bool add,
    double scale = 1.0);

// bucket[offsets[i] ...] = sources[i], cast; the rest of the bucket does not change.
void cast(const at::Tensor& bucket, at::TensorList sources, at::IntArrayRef offsets);

// out[0] = sum of the squares of all elements, out[1] = number of NaN and infinite ones. `out` is
// float64 [2] on the shards' device, so that one all-reduce sums both. Equal inputs give equal
// bits. `known`, on the CPU only, is empty or has a tensor for each shard: the result of
// squares_by_chunk(), or undefined.
void sum_of_squares(
    const at::Tensor& out,
    at::TensorList shards,
    const std::vector<at::Tensor>& known = {});

// Computes both sums of each chunk of each shard, float64 [2 * num_chunks]; see Note [Chunks].
// Shards have one dtype.
void squares_by_chunk(const at::Tensor& squares, at::TensorList shards);

} // namespace zerocore::kernels

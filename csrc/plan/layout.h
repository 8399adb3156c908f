// Where the parameters of a unit lie in its buffer: regions, offsets, padding, each rank's shard.
//
//   unit buffer   | region 0 (float32, trainable)        | region 1 (float32, frozen) | ...
//   region        | weight ....|gap| bias .|gap| ... |tail padding|
//   shards        | rank 0       | rank 1       | rank 2          |   equal parts
//
// Parameters are contiguous in their region and start on a multiple of kParamAlignment bytes. A
// region is padded so that its shards are equal and a multiple of kShardAlignment bytes, which
// keeps every rank's bytes of a collective aligned.
//
// Note [Shards of rows]
// By rows, a rank owns the rows of each parameter that torch.chunk gives it (DTensor's Shard(0)):
//
//   on the wire   | weight, rows of 0 | bias, rows of 0 | weight, rows of 1 | bias, rows of 1 |
//   unsharded     | weight ....................... |pad| bias ................... |pad|
//
// On the wire, values lie in the order of ranks; layers read them in the order of parameters. A
// gather therefore ends with a copy, unless the region has no padding and has one parameter or one
// rank. Both orders have the same size, because torch.chunk leaves gaps only after the last row. A
// unit with a parameter that has fsdp_pre_all_gather is laid out by rows; others need not be.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "common/math.h"
#include "common/types.h"

namespace zerocore {

constexpr int64_t kParamAlignment = 128; // bytes
constexpr int64_t kShardAlignment = 16; // bytes
constexpr int64_t kRegionAlignment = 256; // bytes, start of a region in a buffer

// Type of an element.
struct ElementType {
  int dtype = 0; // c10::ScalarType as a number; only compared here
  int64_t itemsize = 0; // bytes; 0 if the type is not given

  bool operator==(const ElementType& other) const = default;
};

// A parameter as the planner sees it: names and integers, no tensor.
struct ParamSpec {
  std::string fqn;
  std::vector<int64_t> shape;
  int dtype = 0; // the dtype that layers compute in and all-gathers move
  int64_t itemsize = 0; // bytes of one element
  bool requires_grad = true;
  // Dtypes of main weights, of gradients on the wire, and of kept gradients, for a parameter that
  // requires grad; by default the parameter's own dtype.
  ElementType main = {}, reduce = {}, grad = {};
  ElementType gather = {}; // one-byte dtype on the wire, see common/math.h; by default `dtype`
  // False for a parameter with fsdp_pre_all_gather (FSDP2). The unit gathers the tensors that
  // fsdp_pre_all_gather returns, as parameters of their own, and is laid out by rows.
  bool is_gathered = true;
  bool is_kept = true; // false, only if !is_gathered: the unit does not own the shard's memory

  int64_t numel() const {
    int64_t numel = 1;
    for (const int64_t size : shape) {
      numel = checked_mul(numel, size);
    }
    return numel;
  }
  // Returns the shape of the rows that `part` elements fill.
  std::vector<int64_t> rows_of(int64_t part) const {
    std::vector<int64_t> sizes = shape;
    sizes.front() = part == 0 ? 0 : part / (numel() / shape.front());
    return sizes;
  }
};

// The place of one parameter. Offsets and sizes count elements.
struct ParamPlace {
  int region = 0;
  int64_t offset = 0; // in the full region
  int64_t numel = 0;
  int64_t shard_offset = 0; // by rows: the parameter's offset in each shard
  int64_t shard_numel = 0; // by rows: the size of the parameter's largest part

  Range range() const {
    return {offset, offset + numel};
  }
};

// Elements on the wire by rows: `numel` elements in runs of `run` (the last may be shorter). The
// first run starts at `begin`; the starts of runs are `stride` apart.
struct WireRuns {
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t run = 0;
  int64_t stride = 0;
};

// A contiguous part of a unit's buffer, moved by one collective. Its parameters share all types.
struct Region {
  int dtype = 0;
  int64_t itemsize = 0;
  bool requires_grad = true;
  bool is_gathered = true; // false: the unit's buffers of parameters lack this region
  bool is_kept = true; // false: the unit has no weights of this region either
  ElementType main, reduce, grad; // see ParamSpec; the region's own type if frozen
  ElementType gather; // see ParamSpec
  int64_t shard_numel = 0;
  int64_t num_shards = 1;
  int64_t num_across = 1; // shards of different replicas that are adjacent
  std::vector<int> params; // indices into the unit's parameters, in order of offset

  ElementType own() const {
    return {dtype, itemsize};
  }
  // Returns whether the optimizer updates main weights with memory of their own.
  bool has_main() const {
    return is_gathered ? main != own() : is_kept;
  }
  // Returns whether gradients travel in another dtype than the dtype of kept gradients.
  bool has_wire() const {
    return reduce != grad;
  }
  // Returns whether all-gathers move one-byte numbers and their scales.
  bool is_encoded() const {
    return gather.itemsize > 0;
  }
  int64_t numel() const {
    return shard_numel * num_shards;
  }
  int64_t nbytes() const {
    return numel() * itemsize;
  }
  int64_t shard_nbytes() const {
    return shard_numel * itemsize;
  }
  // Shards are numbered replica by replica, see Note [Sharded across].
  Range shard_range(int64_t shard) const {
    const int64_t num_within = num_shards / num_across;
    const int64_t place = shard % num_within * num_across + shard / num_within;
    return {place * shard_numel, (place + 1) * shard_numel};
  }
};

class Layout {
 public:
  // Lays out `params` for `num_shards` equal shards. Parameters of the same types and the same
  // requires_grad share a region; regions appear in the order of their first parameter.
  // See Note [Shards of rows] for `by_rows`, Region::shard_range for `num_across`. A shard is
  // padded to `num_cuts` equal parts. Throws c10::ValueError for num_shards < 1 or a parameter
  // without a valid shape or itemsize; by rows, also for one without a dimension.
  static Layout build(
      const std::vector<ParamSpec>& params,
      int64_t num_shards,
      bool by_rows = false,
      int64_t num_across = 1,
      int64_t num_cuts = 1);

  // By rows: returns where a parameter's elements lie on the wire.
  WireRuns wire_runs(int param) const;
  // By rows: returns the gaps of a region on the wire.
  std::vector<WireRuns> wire_gaps(int region) const;

  // Returns the layout of one shard: the same regions without the other ranks' parts. Each
  // parameter is reduced to its owned range, which is no longer aligned.
  Layout of_shard(int64_t shard) const;
  // Returns the regions with room for `count` shards. Ignore places() of the result.
  Layout of_shards(int64_t count) const;
  // Returns the regions as all-gathers move them, see Region::is_encoded. Ignore places() of the
  // result.
  Layout encoded() const;
  // Returns the same places with elements of another type: &Region::main, reduce or grad.
  Layout retyped(ElementType Region::* type) const;

  const std::vector<Region>& regions() const {
    return regions_;
  }
  const std::vector<ParamPlace>& places() const {
    return places_;
  }
  int64_t num_shards() const {
    return num_shards_;
  }
  bool by_rows() const {
    return by_rows_;
  }
  // Returns whether gathered values must be reordered or decoded before layers can use them.
  bool copies_out() const;
  // Returns the bytes of the full buffer, with gaps and padding.
  int64_t nbytes() const {
    return nbytes_;
  }
  // Returns the indices of the regions for which `is_so(region)` is true.
  template <typename IsSo>
  std::vector<int> regions_where(const IsSo& is_so) const {
    std::vector<int> indices;
    for (int index = 0; index < static_cast<int>(regions_.size()); ++index) {
      if (std::invoke(is_so, regions_[index])) {
        indices.push_back(index);
      }
    }
    return indices;
  }
  std::vector<int> gathered_regions() const {
    return regions_where(&Region::is_gathered);
  }
  std::vector<int> kept_regions() const {
    return regions_where(&Region::is_kept);
  }
  // Returns the bytes of a buffer that holds only these regions, one after the other.
  int64_t nbytes_of(const std::vector<int>& regions) const;
  // Returns the gathered bytes that one rank owns, with padding.
  int64_t shard_nbytes() const;
  // Returns the bytes of the gathered parameters, without gaps and padding.
  int64_t param_nbytes() const;

  // Returns the range of the parameter's flattened elements that `shard` owns; it may be empty.
  Range owned(int param, int64_t shard) const;
  // Returns the offset of that range in the shard, in elements; 0 for an empty range.
  int64_t offset_in_shard(int param, int64_t shard) const;

 private:
  Layout(
      std::vector<Region> regions,
      std::vector<ParamPlace> places,
      int64_t num_shards,
      bool by_rows);
  bool moves_rows() const;
  // Asserts the invariants that build() promises.
  void validate() const;

  std::vector<Region> regions_;
  std::vector<ParamPlace> places_;
  int64_t num_shards_ = 1;
  bool by_rows_ = false;
  int64_t nbytes_ = 0;
};

} // namespace zerocore

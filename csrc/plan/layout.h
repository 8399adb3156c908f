// Where every parameter of a unit lies: regions, offsets, padding, each rank's part.
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
// By rows, a rank owns of each parameter the rows that torch.chunk gives it (DTensor's Shard(0)):
//
//   on the wire   | weight, rows of 0 | bias, rows of 0 | weight, rows of 1 | bias, rows of 1 |
//   unsharded     | weight ....................... |pad| bias ................... |pad|
//
// Collectives move rank after rank, layers want parameter after parameter, so the two differ by a
// copy, unless a region has one parameter (or one rank) and nothing to pad. Both have the same
// size, as torch.chunk leaves its gaps behind the last row only.
// A unit with a parameter that gathers itself is laid out by rows, also among others that are not.
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
  int dtype = 0; // c10::ScalarType as a number; only compared, never interpreted here
  int64_t itemsize = 0; // bytes; 0 where the type is not given

  bool operator==(const ElementType& other) const = default;
};

// A parameter as the planner sees it: names and integers, no tensor.
struct ParamSpec {
  std::string fqn;
  std::vector<int64_t> shape;
  int dtype = 0; // what layers compute with and gathers move
  int64_t itemsize = 0; // bytes of one element
  bool requires_grad = true;
  // Of a parameter that requires grad, the parameter's own where not given: the optimizer's copy,
  // gradients on their way, and gradients as they are kept.
  ElementType main = {}, reduce = {}, grad = {};
  ElementType gather = {}; // of one byte, with scales, see common/math.h; else as it is
  // Else other parameters of the unit are gathered in its place, and the unit is laid out by rows.
  bool is_gathered = true;
  bool is_kept = true; // else its shards are no memory of the unit; only if it is not gathered

  int64_t numel() const {
    int64_t numel = 1;
    for (const int64_t size : shape) {
      numel = checked_mul(numel, size);
    }
    return numel;
  }
  // The shape of so many rows that they have `part` elements.
  std::vector<int64_t> rows_of(int64_t part) const {
    std::vector<int64_t> sizes = shape;
    sizes.front() = part == 0 ? 0 : part / (numel() / shape.front());
    return sizes;
  }
};

// Place of one parameter. Offsets and sizes count elements.
struct ParamPlace {
  int region = 0;
  int64_t offset = 0; // in the region, unsharded
  int64_t numel = 0;
  int64_t shard_offset = 0; // by rows: in a shard, the same in all
  int64_t shard_numel = 0; // by rows: of the largest part of it

  Range range() const {
    return {offset, offset + numel};
  }
};

// By rows, on the wire: `numel` elements from `begin` on, `run` of them (the last time maybe fewer)
// every `stride`.
struct WireRuns {
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t run = 0;
  int64_t stride = 0;
};

// One contiguous part of a unit's buffer that is moved by one collective.
struct Region {
  int dtype = 0;
  int64_t itemsize = 0;
  bool requires_grad = true;
  bool is_gathered = true; // else nothing of it is in buffers of parameters
  bool is_kept = true; // else no weights of it either
  ElementType main, reduce, grad; // as of its parameters; the region's own where frozen
  ElementType gather; // as of its parameters
  int64_t shard_numel = 0;
  int64_t num_shards = 1;
  int64_t num_across = 1; // shards of different replicas that follow each other
  std::vector<int> params; // indices into the unit's parameters, in order of offset

  ElementType own() const {
    return {dtype, itemsize};
  }
  // The optimizer has a copy of its own.
  bool has_main() const {
    return is_gathered ? main != own() : is_kept;
  }
  // Gradients travel in another type than they are kept in.
  bool has_wire() const {
    return reduce != grad;
  }
  // Gathers move numbers of one byte and their scales.
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
  // With `by_rows` see Note [Shards of rows], with `num_across` Region::shard_range. A shard is
  // padded to `num_cuts` equal parts. Throws c10::ValueError for num_shards < 1 or a parameter
  // without a valid shape or itemsize; by rows, also for one without a dimension.
  static Layout build(
      const std::vector<ParamSpec>& params,
      int64_t num_shards,
      bool by_rows = false,
      int64_t num_across = 1,
      int64_t num_cuts = 1);

  // By rows: where a parameter's elements lie on the wire; and where a region has none.
  WireRuns wire_runs(int param) const;
  std::vector<WireRuns> wire_gaps(int region) const;

  // The layout of what one shard holds: the same regions without the other ranks' parts, every
  // parameter reduced to its owned range (not aligned any more).
  Layout of_shard(int64_t shard) const;
  // Regions with room for so many shards; places have no meaning in it.
  Layout of_shards(int64_t count) const;
  // Regions as gathers move them, see Region::is_encoded; places have no meaning in it.
  Layout encoded() const;
  // The same places with elements of another type: &Region::main, &Region::reduce, &Region::grad.
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
  // Whether parameters lie in another order on the wire than layers want them, or are encoded.
  bool copies_out() const;
  // Bytes of the unsharded unit buffer, gaps and padding included.
  int64_t nbytes() const {
    return nbytes_;
  }
  // Indices of the regions for which `is_so(region)`; of those that are gathered, and of those that
  // the unit keeps.
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
  // Bytes of a buffer that holds only some of the regions, one after the other.
  int64_t nbytes_of(const std::vector<int>& regions) const;
  // Bytes that one rank owns of what is gathered.
  int64_t shard_nbytes() const;
  // Bytes of the gathered parameters themselves.
  int64_t param_nbytes() const;

  // The flattened elements of parameter `param` that `shard` owns, possibly empty.
  Range owned(int param, int64_t shard) const;
  // Where that range starts in the shard, in elements; 0 for an empty range.
  int64_t offset_in_shard(int param, int64_t shard) const;

 private:
  Layout(
      std::vector<Region> regions,
      std::vector<ParamPlace> places,
      int64_t num_shards,
      bool by_rows);
  bool moves_rows() const;
  // Checks what build() promises; a violation is a bug.
  void validate() const;

  std::vector<Region> regions_;
  std::vector<ParamPlace> places_;
  int64_t num_shards_ = 1;
  bool by_rows_ = false;
  int64_t nbytes_ = 0;
};

} // namespace zerocore

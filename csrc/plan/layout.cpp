#include "plan/layout.h"

#include <algorithm>

#include "common/math.h"

namespace zerocore {

namespace {

void check_spec(const ParamSpec& spec, bool by_rows) {
  TORCH_CHECK_VALUE(
      !by_rows || !spec.shape.empty(),
      "parameter '",
      spec.fqn,
      "' has no dimension to shard; make it a vector of one element");
  TORCH_CHECK_VALUE(
      spec.itemsize > 0,
      "parameter '",
      spec.fqn,
      "': itemsize must be positive, got ",
      spec.itemsize);
  for (const int64_t size : spec.shape) {
    TORCH_CHECK_VALUE(
        size >= 0, "parameter '", spec.fqn, "': sizes must not be negative, got ", size);
  }
}

// Returns an empty region for parameters like `spec`. By rows, a frozen parameter keeps all types,
// because the user may unfreeze it later.
Region make_region(const ParamSpec& spec, int64_t num_shards, bool by_rows) {
  Region region;
  region.dtype = spec.dtype;
  region.itemsize = spec.itemsize;
  region.requires_grad = spec.requires_grad;
  region.is_gathered = spec.is_gathered;
  region.is_kept = spec.is_kept;
  region.num_shards = num_shards;
  const auto resolve = [&](const ElementType& type) {
    return (spec.requires_grad || by_rows) && type.itemsize > 0 ? type : region.own();
  };
  region.main = resolve(spec.main);
  region.reduce = resolve(spec.reduce);
  region.grad = resolve(spec.grad);
  region.gather = spec.gather;
  return region;
}

bool same_kind(const Region& a, const Region& b) {
  return a.own() == b.own() && a.requires_grad == b.requires_grad &&
      a.is_gathered == b.is_gathered && a.is_kept == b.is_kept && a.main == b.main &&
      a.reduce == b.reduce && a.grad == b.grad && a.gather == b.gather;
}

int find_or_add_region(
    std::vector<Region>& regions,
    const ParamSpec& spec,
    int64_t num_shards,
    bool by_rows) {
  Region region = make_region(spec, num_shards, by_rows);
  const auto found =
      std::ranges::find_if(regions, [&](const Region& other) { return same_kind(other, region); });
  if (found != regions.end()) {
    return static_cast<int>(found - regions.begin());
  }
  regions.push_back(std::move(region));
  return static_cast<int>(regions.size()) - 1;
}

// Returns the bytes of the narrowest type. An offset that is aligned in it is aligned in all types.
int64_t narrowest(const Region& region) {
  return std::min({region.itemsize, region.main.itemsize, region.reduce.itemsize});
}

// Returns the number of elements in the largest chunk of torch.chunk.
int64_t chunk_numel(const ParamSpec& spec, int64_t num_shards) {
  const int64_t rows = spec.shape.front();
  return rows == 0 ? 0 : ceil_div(rows, num_shards) * (spec.numel() / rows);
}

// Returns the number of elements that fit into `nbytes`, at least one.
int64_t aligned_numel(int64_t nbytes, int64_t itemsize) {
  return std::max<int64_t>(1, nbytes / itemsize);
}

} // namespace

Layout Layout::build(
    const std::vector<ParamSpec>& params,
    int64_t num_shards,
    bool by_rows,
    int64_t num_across,
    int64_t num_cuts) {
  TORCH_CHECK_VALUE(num_shards >= 1, "num_shards must be at least 1, got ", num_shards);
  std::vector<Region> regions;
  std::vector<ParamPlace> places;
  std::vector<int64_t> used; // elements used in each region; by rows, in each of its shards
  places.reserve(params.size());
  for (size_t i = 0; i < params.size(); ++i) {
    const ParamSpec& spec = params[i];
    check_spec(spec, by_rows);
    const int region = find_or_add_region(regions, spec, num_shards, by_rows);
    used.resize(regions.size(), 0);
    const int64_t alignment = aligned_numel(kParamAlignment, narrowest(regions[region]));
    const int64_t offset = round_up(used[region], alignment);
    if (by_rows) {
      const int64_t part = chunk_numel(spec, num_shards);
      places.push_back({region, num_shards * offset, spec.numel(), offset, part});
      used[region] = offset + part;
    } else {
      places.push_back({region, offset, spec.numel()});
      used[region] = offset + spec.numel();
    }
    regions[region].params.push_back(static_cast<int>(i));
  }
  for (size_t i = 0; i < regions.size(); ++i) {
    const int64_t aligned = regions[i].is_encoded()
        ? kAlignedScaledNumel
        : aligned_numel(kShardAlignment, narrowest(regions[i]));
    const int64_t multiple = num_cuts * aligned;
    regions[i].num_across = num_across;
    const int64_t numel = by_rows ? used[i] : ceil_div(used[i], num_shards);
    // Gives an empty region memory, too: some backends fail on collectives of no bytes.
    regions[i].shard_numel = round_up(std::max<int64_t>(1, numel), multiple);
  }
  Layout layout(std::move(regions), std::move(places), num_shards, by_rows);
  layout.validate();
  return layout;
}

Layout::Layout(
    std::vector<Region> regions,
    std::vector<ParamPlace> places,
    int64_t num_shards,
    bool by_rows)
    : regions_(std::move(regions)),
      places_(std::move(places)),
      num_shards_(num_shards),
      by_rows_(by_rows) {
  nbytes_ = nbytes_of(gathered_regions());
}

Layout Layout::of_shard(int64_t shard) const {
  std::vector<Region> regions = regions_;
  for (Region& region : regions) {
    region.num_shards = region.num_across = 1;
  }
  std::vector<ParamPlace> places;
  places.reserve(places_.size());
  for (int i = 0; i < static_cast<int>(places_.size()); ++i) {
    places.push_back({places_[i].region, offset_in_shard(i, shard), owned(i, shard).size()});
  }
  return Layout(std::move(regions), std::move(places), 1, /*by_rows=*/false);
}

Layout Layout::of_shards(int64_t count) const {
  std::vector<Region> regions = regions_;
  for (Region& region : regions) {
    region.num_shards = count;
    region.num_across = 1;
  }
  return Layout(std::move(regions), places_, count, /*by_rows=*/false);
}

Layout Layout::retyped(ElementType Region::* type) const {
  std::vector<Region> regions = regions_;
  for (Region& region : regions) {
    const ElementType element = region.*type;
    region.dtype = element.dtype;
    region.itemsize = element.itemsize;
  }
  return Layout(std::move(regions), places_, num_shards_, by_rows_);
}

Layout Layout::encoded() const {
  std::vector<Region> regions = regions_;
  for (Region& region : regions) {
    if (region.is_encoded()) {
      region.dtype = 0; // bytes
      region.itemsize = 1;
      region.shard_numel = scaled_nbytes(region.shard_numel);
    }
  }
  return Layout(std::move(regions), places_, num_shards_, by_rows_);
}

bool Layout::copies_out() const {
  return std::ranges::any_of(regions_, &Region::is_encoded) || moves_rows();
}

bool Layout::moves_rows() const {
  return by_rows_ && num_shards_ > 1 &&
      std::any_of(regions_.begin(), regions_.end(), [&](const Region& region) {
           return region.is_gathered &&
               (region.params.size() > 1 ||
                places_[region.params.front()].shard_numel != region.shard_numel);
         });
}

int64_t Layout::nbytes_of(const std::vector<int>& regions) const {
  int64_t nbytes = 0;
  for (const int region : regions) {
    nbytes = round_up(nbytes, kRegionAlignment) + regions_.at(region).nbytes();
  }
  return nbytes;
}

int64_t Layout::shard_nbytes() const {
  int64_t nbytes = 0;
  for (const int region : gathered_regions()) {
    nbytes += regions_[region].shard_nbytes();
  }
  return nbytes;
}

int64_t Layout::param_nbytes() const {
  int64_t nbytes = 0;
  for (const ParamPlace& place : places_) {
    const Region& region = regions_[place.region];
    nbytes += region.is_gathered ? place.numel * region.itemsize : 0;
  }
  return nbytes;
}

Range Layout::owned(int param, int64_t shard) const {
  const ParamPlace& place = places_.at(param);
  if (by_rows_) {
    const int64_t begin = std::min(shard * place.shard_numel, place.numel);
    const int64_t end = std::min(begin + place.shard_numel, place.numel);
    return begin == end ? Range{0, 0} : Range{begin, end};
  }
  const Range part = intersect(place.range(), regions_[place.region].shard_range(shard));
  if (part.empty()) {
    return {0, 0};
  }
  return {part.begin - place.offset, part.end - place.offset};
}

WireRuns Layout::wire_runs(int param) const {
  const ParamPlace& place = places_.at(param);
  return {place.shard_offset, place.numel, place.shard_numel, regions_[place.region].shard_numel};
}

// Gaps lie between the parameters of every shard, and after the last row of each parameter.
std::vector<WireRuns> Layout::wire_gaps(int region) const {
  std::vector<WireRuns> gaps;
  const int64_t shard = regions_.at(region).shard_numel;
  const auto add = [&](int64_t begin, int64_t run, int64_t count) {
    if (run > 0 && count > 0) {
      gaps.push_back({begin, run * count, run, shard});
    }
  };
  int64_t end = 0;
  for (const int param : regions_[region].params) {
    const ParamPlace& place = places_[param];
    add(end, place.shard_offset - end, num_shards_);
    end = place.shard_offset + place.shard_numel;
    if (place.shard_numel > 0) {
      const int64_t full = place.numel / place.shard_numel;
      const int64_t rest = place.numel % place.shard_numel;
      const int64_t begin = full * shard + place.shard_offset;
      if (rest > 0) {
        add(begin + rest, place.shard_numel - rest, 1);
      }
      const int64_t first = full + (rest > 0 ? 1 : 0);
      add(first * shard + place.shard_offset, place.shard_numel, num_shards_ - first);
    }
  }
  add(end, shard - end, num_shards_);
  return gaps;
}

int64_t Layout::offset_in_shard(int param, int64_t shard) const {
  const ParamPlace& place = places_.at(param);
  const Range range = owned(param, shard);
  if (range.empty()) {
    return 0;
  }
  if (by_rows_) {
    return place.shard_offset;
  }
  return place.offset + range.begin - regions_[place.region].shard_range(shard).begin;
}

void Layout::validate() const {
  for (const Region& region : regions_) {
    TORCH_INTERNAL_ASSERT(region.shard_nbytes() % kShardAlignment == 0);
    int64_t end = 0;
    for (const int param : region.params) {
      const ParamPlace& place = places_[param];
      TORCH_INTERNAL_ASSERT(place.offset >= end, "parameters overlap");
      TORCH_INTERNAL_ASSERT(place.offset * region.itemsize % kParamAlignment == 0);
      end = place.offset + place.numel;
    }
    TORCH_INTERNAL_ASSERT(end <= region.numel(), "region too small");
  }
}

} // namespace zerocore

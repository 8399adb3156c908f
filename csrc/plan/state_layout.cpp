#include "plan/state_layout.h"

#include <algorithm>

#include "common/math.h"

namespace zerocore {

namespace {

bool is_moment(Memory part) {
  return part == Memory::ExpAvg || part == Memory::ExpAvgSq;
}

} // namespace

void HostLayout::add(const Layout& layout, const UnitMesh& mesh) {
  const auto sizes = part_sizes(Tier::Host, layout, tiers_, mesh);
  HostUnit unit;
  for (const Memory part : kStateParts) {
    int64_t& end = is_moment(part) ? moments_nbytes_ : parts_nbytes_;
    unit.parts[part] = {end, end + sizes[part]};
    end += round_up(sizes[part], kRegionAlignment);
    if (part == Memory::Kept) {
      gradients_nbytes_ += sizes[part];
    } else if (is_moment(part)) {
      moment_elements_nbytes_ += sizes[part] > 0 ? moment_elements(layout, mesh.shard()) : 0;
    } else {
      weights_nbytes_ += sizes[part];
    }
  }
  add_gradients(layout, unit);
  units_.push_back(std::move(unit));
}

void HostLayout::add_gradients(const Layout& layout, HostUnit& unit) {
  unit.gradients.resize(layout.regions().size());
  const Range& all = unit.parts[Memory::Kept];
  if (all.empty()) {
    return;
  }
  int64_t begin = all.begin;
  for (const int region : Tiers::trained_regions(layout)) { // laid out as in a bucket
    begin = round_up(begin, kRegionAlignment);
    const Region& kept = layout.regions()[region];
    const int64_t nbytes = kept.grad.itemsize * kept.shard_numel;
    unit.gradients[region] = {begin, begin + nbytes};
    if (lands_) {
      const int64_t widest = std::max(kept.grad.itemsize, kept.reduce.itemsize) * kept.shard_numel;
      landing_nbytes_ = std::max(landing_nbytes_, round_up(widest, kRegionAlignment));
    }
    begin += nbytes;
  }
}

int64_t HostLayout::moment_elements(const Layout& layout, int64_t shard) const {
  int64_t nbytes = 0;
  for (const int region : Tiers::trained_regions(layout)) {
    for (const int param : layout.regions()[region].params) {
      nbytes += layout.regions()[region].main.itemsize * layout.owned(param, shard).size();
    }
  }
  return nbytes;
}

// Moments begin on a page of their own, so that no pinned page holds any.
int64_t HostLayout::moments_begin() const {
  return moments_nbytes_ == 0 ? copied_nbytes() : round_up(copied_nbytes(), page_nbytes());
}

Range HostLayout::landing_buffer(int index) const {
  const int64_t begin = parts_nbytes_ + index * landing_nbytes_;
  return {begin, begin + landing_nbytes_};
}

Range HostLayout::part(UnitId unit, Memory which) const {
  const Range& range = units_.at(unit).parts[which];
  const int64_t begin = is_moment(which) ? moments_begin() : 0;
  return {begin + range.begin, begin + range.end};
}

Range HostLayout::gradient(UnitId unit, int region) const {
  return units_.at(unit).gradients.at(region);
}

Range DiskLayout::take(int64_t nbytes) {
  const int64_t begin = file_nbytes_;
  file_nbytes_ += round_up(nbytes, page_nbytes());
  return {begin, file_nbytes_};
}

void DiskLayout::add(const Layout& layout, const UnitMesh& mesh) {
  DiskUnit unit;
  const auto sizes = part_sizes(Tier::Disk, layout, tiers_, mesh);
  for (const Memory part : kStateParts) {
    unit.parts[part] = take(sizes[part]);
  }
  unit.updated = {unit.parts[Memory::Shard].begin, file_nbytes_};
  const std::vector<int> trained = Tiers::trained_regions(layout);
  if (trained.empty()) {
    unit.updated.begin = file_nbytes_;
  } else if (!unit.parts[Memory::Shard].empty()) {
    const Layout own = layout.of_shard(mesh.shard());
    std::vector<int> before = own.gathered_regions();
    std::erase_if(before, [&](int region) { return region >= trained.front(); });
    unit.updated.begin += own.nbytes_of(before) / page_nbytes() * page_nbytes();
  }
  units_.push_back(unit);
}

int64_t DiskLayout::buffers_nbytes() const {
  int64_t update = 0, load = 0;
  for (const DiskUnit& unit : units_) {
    update = std::max(update, unit.updated.size());
    load = std::max(load, unit.parts[Memory::Shard].size());
  }
  return kNumUpdated * update + kNumLoaded * load;
}

} // namespace zerocore

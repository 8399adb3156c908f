// Where the bytes of units lie in a file.
#include "plan/disk_layout.h"

#include <algorithm>

#include "common/math.h"
#include "common/pages.h"

namespace zerocore {

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

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

void DiskLayout::add(const Layout& layout) {
  const Layout own = layout.of_shard(shard_);
  const Layout main = own.retyped(&Region::main);
  const std::vector<int> trained = tiers_.trained_regions(layout);
  const bool has_states = tiers_.states == Tier::Disk;
  const bool has_parameters = tiers_.parameters == Tier::Disk && shards_parameters_;
  const int64_t moment = has_states ? main.nbytes_of(trained) : 0;
  DiskUnit unit;
  unit.parts = {
      take(has_parameters ? own.nbytes() : 0),
      take(has_states ? main.nbytes_of(tiers_.main_regions(layout)) : 0),
      take(has_states ? own.nbytes_of(tiers_.sent_regions(layout)) : 0),
      take(moment),
      take(moment)};
  unit.updated = {file_nbytes_, file_nbytes_};
  if (!trained.empty()) {
    std::vector<int> before = own.all_regions();
    std::erase_if(before, [&](int region) { return region >= trained.front(); });
    const int64_t skipped = has_parameters ? own.nbytes_of(before) : 0;
    unit.updated.begin = unit.parts[0].begin + skipped / page_nbytes() * page_nbytes();
  }
  units_.push_back(unit);
}

int64_t DiskLayout::load_nbytes() const {
  int64_t nbytes = 0;
  for (const DiskUnit& unit : units_) {
    nbytes = std::max(nbytes, unit.part(DiskPart::Parameters).size());
  }
  return nbytes;
}

int64_t DiskLayout::buffers_nbytes() const {
  int64_t update = 0;
  for (const DiskUnit& unit : units_) {
    update = std::max(update, unit.updated.size());
  }
  return kNumUpdateBuffers * update + kNumLoadBuffers * load_nbytes();
}

} // namespace zerocore

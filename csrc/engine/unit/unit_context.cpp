// The parts of an engine that its units share.
#include "engine/unit/unit_context.h"

#include "engine/unit/disk_states.h"
#include "engine/unit/host_states.h"
#include "runtime/bucket.h"

namespace zerocore {

c10::DataPtr UnitContext::memory_of(Tier tier, UnitId unit, StatePart part, int64_t nbytes) const {
  switch (tier) {
    case Tier::Host:
      return host->memory(unit, part);
    case Tier::Disk:
      return disk->memory(unit, part);
    case Tier::Device:
      break;
  }
  return allocate_memory(streams->device(), nbytes);
}

} // namespace zerocore

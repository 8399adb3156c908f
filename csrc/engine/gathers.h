// Brings the parameters of a unit from the ranks that hold them; where this rank's part is not on
// the device, from the host or the disk first.
#pragma once

#include <future>
#include <string>
#include <vector>

#include "engine/unit_context.h"
#include "runtime/bucket.h"
#include "runtime/collectives.h"

namespace zerocore {

// What gathers of a unit read and write.
struct GatherMemory {
  const Bucket& bucket; // that layers compute with
  const Bucket& received; // as it comes from the wire: the same, or a staging
  const Bucket* shards; // this rank's part; null where it is in the bucket
};

class Gathers {
 public:
  // `name` and `context` outlive it.
  Gathers(UnitId id, const std::string& name, const UnitContext& context)
      : id_(id), name_(name), context_(context) {}

  // Issues those of `regions`, in one launch where the backend can. This rank's part has its values
  // when `after`, if it is valid, is ready.
  void begin(
      const std::vector<int>& regions,
      const GatherMemory& memory,
      const std::shared_future<void>& after);
  // Behind the last copy from parameters on the host, which may not change before; null for none.
  const StreamEvent& loaded() const {
    return loaded_;
  }
  // Orders compute behind them, or blocks, see PendingCollective::wait.
  void wait();

 private:
  void gather(
      int region,
      const GatherMemory& memory,
      std::shared_future<void> after,
      std::vector<CollectiveCall>* together);
  std::shared_future<void> load(
      int region,
      const GatherMemory& memory,
      const std::shared_future<void>& after);

  const UnitId id_;
  const std::string& name_;
  const UnitContext& context_;
  std::vector<PendingCollective> pending_;
  StreamEvent loaded_;
  std::vector<std::shared_future<void>> loads_; // that no gather waits for
};

} // namespace zerocore

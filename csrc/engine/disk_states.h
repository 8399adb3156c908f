// What units have on disk: the memory of their buckets and of their moments, brought in for
// updates and read for gathers. See Note [Memory of a file] and Note [Swapping].
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/disk_loads.h"
#include "engine/unit.h"
#include "plan/disk_layout.h"
#include "runtime/swapped_units.h"

namespace zerocore {

struct DiskPlace {
  std::string folder;
  std::string name; // of this rank's states, in errors
};

class DiskStates {
 public:
  // Of nothing until open(). The units, which come later, and the context outlive it.
  DiskStates(const std::vector<std::unique_ptr<Unit>>& units, const UnitContext& context)
      : units_(units), context_(context) {}
  DiskStates(const DiskStates&) = delete;
  DiskStates& operator=(const DiskStates&) = delete;

  // Reserves the file for the units as they are. Throws std::system_error where there is no room.
  void open(const DiskPlace& place);
  // Of a unit's part, zeros at first.
  c10::DataPtr memory(UnitId unit, DiskPart part) const;
  // Moments of AdamW for a trained parameter, 1-D, zeros the first time; none where they are not on
  // disk. Throws c10::ValueError while another optimizer has them.
  std::vector<at::Tensor> make_moments(UnitId unit, int param);
  // Whether a tensor was made of them before.
  bool had_moments(UnitId unit, int param) const;
  // Writes what was filled by hand, and frees its memory.
  void store(UnitId unit);
  // Throws what went wrong with the file.
  void check() const;

  // -- updates. Any thread says that one is coming, and one carries them out.
  void announce(UnitId unit) {
    coming_[unit] = true;
  }
  // The units that will be updated, in order.
  void begin_step(std::vector<UnitId> order);
  // The unit's bytes are in memory; what was brought stays until it is given back.
  void bring(UnitId unit);
  // What was brought is changed, and goes to the file; where gathers read it, it is there.
  void give_back(UnitId unit);
  // Everything is in the file.
  void end_step();

  // -- gathers
  DiskLoads& loads() {
    return *loads_;
  }

  int64_t file_nbytes() const {
    return !layout_ ? 0 : layout_->file_nbytes();
  }
  int64_t buffers_nbytes() const {
    return !layout_ ? 0 : layout_->buffers_nbytes();
  }
  // In the child of a fork: nothing is waited for.
  void mark_forked() {
    static_cast<void>(swapped_.release());
    static_cast<void>(loads_.release());
  }

 private:
  using Given = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Moments {
    std::array<std::optional<Bucket>, 2> buckets; // exp_avg, exp_avg_sq
    std::vector<std::optional<Given>> given; // by parameter
  };

  void make_buckets();
  DiskLoads::VersionOf version_of() const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  const UnitContext& context_;
  std::optional<DiskLayout> layout_;
  std::unique_ptr<SwappedUnits> swapped_;
  std::unique_ptr<DiskLoads> loads_; // ends before the file does
  std::vector<Moments> moments_; // by unit
  std::vector<bool> brought_; // by unit
  std::unique_ptr<std::atomic<bool>[]> coming_; // by unit: an update that the file does not have
};

} // namespace zerocore

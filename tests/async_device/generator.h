// The device's random numbers, which the stream's thread draws from a CPU generator.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>

#include <cstdint>

#include "device.h"

namespace async_device {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator()
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        on_cpu(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override {
    on_cpu.set_current_seed(seed);
  }
  uint64_t current_seed() const override {
    return on_cpu.current_seed();
  }
  uint64_t seed() override {
    return on_cpu.seed();
  }
  void set_offset(uint64_t offset) override {
    on_cpu.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return on_cpu.get_offset();
  }
  void set_state(const c10::TensorImpl& state) override {
    on_cpu.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator on_cpu;

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator();
    copy->on_cpu = on_cpu.clone();
    return copy;
  }
};

inline const at::Generator& default_generator() {
  static const auto& instance = *new at::Generator(at::make_generator<DeviceGenerator>());
  return instance;
}

} // namespace async_device

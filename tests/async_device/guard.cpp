// The device as c10 knows it: its streams, its events and its random numbers.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "allocator.h"
#include "device.h"
#include "generator.h"
#include "queue.h"

namespace async_device {

namespace {

// The contents of a c10::Event; recording it again sets another point.
struct Event {
  PointPtr point;
};

int id_of(const c10::Stream& stream) {
  return static_cast<int>(stream.id());
}

c10::Stream stream_of(int id) {
  return c10::Stream(c10::Stream::UNSAFE, kDevice, id);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device /*one*/) const override {
    choose_device();
    return kDevice;
  }
  c10::Device getDevice() const override {
    return kDevice;
  }
  void setDevice(c10::Device /*one*/) const override {
    choose_device();
  }
  void uncheckedSetDevice(c10::Device /*one*/) const noexcept override {
    choose_device();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return 1;
  }

  c10::Stream getStream(c10::Device /*one*/) const override {
    return stream_of(current_stream());
  }
  c10::Stream getDefaultStream(c10::Device /*one*/) const override {
    return stream_of(0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device /*one*/, bool /*high*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream getNewStream(c10::Device /*one*/, int /*priority*/) const override {
    return stream_of(next_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(exchange_stream(id_of(stream)));
  }
  bool isStreamCapturing(const c10::Stream& stream) const { // torch asks from 2.13 on
    return capturing_stream() == id_of(stream);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &queue(id_of(stream));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return queue(id_of(stream)).is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_host_wait("for a stream");
    wait_for_stream(id_of(stream));
  }
  void synchronizeDevice(c10::DeviceIndex /*one*/) const override {
    note_host_wait("for all streams");
    wait_for_device();
  }

  void record(
      void** event,
      const c10::Stream& stream,
      c10::DeviceIndex /*one*/,
      c10::EventFlag /*flag*/) const override {
    check_not_recording("an event");
    if (*event == nullptr) {
      *event = new Event();
    }
    static_cast<Event*>(*event)->point = queue(id_of(stream)).record();
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_not_recording("a wait for an event");
    const auto* recorded = static_cast<Event*>(event);
    if (recorded != nullptr && note_wait({id_of(stream), recorded->point->stream})) {
      queue(id_of(stream)).wait_for(recorded->point);
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Event*>(event)->point->is_reached();
  }
  void destroyEvent(void* event, c10::DeviceIndex /*one*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) {
      return;
    }
    note_host_wait("for an event");
    const PointPtr point = static_cast<Event*>(event)->point;
    if (note_wait({kHost, point->stream})) {
      wait_for_point(point);
    }
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex /*one*/) const override {
    const auto time =
        static_cast<Event*>(end)->point->time() - static_cast<Event*>(begin)->point->time();
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data, id_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex /*one*/) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  void setCurrentDevice(c10::DeviceIndex /*one*/) const override {}
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex /*one*/) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex /*one*/) const override {
    return 0;
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex /*one*/) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex /*one*/) const override {
    return at::make_generator<DeviceGenerator>();
  }
};

[[maybe_unused]] const bool hooks_are_known = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace

} // namespace async_device

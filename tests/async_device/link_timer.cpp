// Books the link by tasks of the streams.
#include "link_timer.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <thread>

#include "queue.h"

namespace async_device {

namespace {

// Streams book one after the other, as a GPU's atomic operation makes them.
struct Bookings {
  std::mutex mutex;
  std::vector<int64_t> durations;
};

Bookings& bookings() {
  static auto& instance = *new Bookings();
  return instance;
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now().time_since_epoch()).count());
}

void book_link(uint64_t* link_free_at, uint64_t* deadline, int64_t duration_ns) {
  queue(current_stream()).push([=] {
    const std::lock_guard lock(bookings().mutex);
    *link_free_at = std::max(now_ns(), *link_free_at) + static_cast<uint64_t>(duration_ns);
    *deadline = *link_free_at;
    bookings().durations.push_back(duration_ns);
  });
}

void hold_link(const uint64_t* deadline, int /*sms*/) {
  queue(current_stream()).push([=] {
    std::this_thread::sleep_until(Clock::time_point(std::chrono::nanoseconds(*deadline)));
  });
}

} // namespace

const zerocore::DeviceTimer& link_timer() {
  static constexpr zerocore::DeviceTimer timer{&book_link, &hold_link};
  return timer;
}

std::vector<int64_t> booked_durations() {
  const std::lock_guard lock(bookings().mutex);
  return bookings().durations;
}

} // namespace async_device

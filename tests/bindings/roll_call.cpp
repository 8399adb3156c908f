// Ranks that tell each other where they are, through a store that counts their requests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "testing.h"
#include "watch/roll_call.h"

namespace py = pybind11;

namespace zerocore {

namespace {

using Bytes = std::vector<uint8_t>;

// Counts what a rank would send to a store on another machine.
class CountingStore : public c10d::HashStore {
 public:
  void set(const std::string& key, const Bytes& data) override {
    note(data.size());
    HashStore::set(key, data);
  }
  Bytes compareSet(const std::string& key, const Bytes& before, const Bytes& after) override {
    note(after.size());
    return HashStore::compareSet(key, before, after);
  }
  Bytes get(const std::string& key) override {
    Bytes data = HashStore::get(key);
    note(data.size());
    return data;
  }
  int64_t add(const std::string& key, int64_t value) override {
    note(sizeof(value));
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    note(0);
    return HashStore::check(keys);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout)
      override {
    note(0);
    HashStore::wait(keys, timeout);
  }
  void append(const std::string& key, const Bytes& data) override {
    note(data.size());
    HashStore::append(key, data);
  }

  int64_t num_requests = 0, num_bytes = 0;

 private:
  void note(size_t nbytes) {
    ++num_requests;
    num_bytes += static_cast<int64_t>(nbytes);
  }
};

RankReport report_of(int64_t waiting, const std::string& unit) {
  RankReport report;
  report.state = RankState::Overdue;
  LedgerState& model = report.models.emplace_back();
  model.model = "Model";
  model.entries = {{waiting, "all_gather", unit, 8, false}};
  model.next = waiting + 1;
  model.waiting = waiting;
  return report;
}

// The report of a rank that waits in a collective of that model; -1 for one that waits in none.
RankReport state_of(int64_t model, int64_t waiting, int64_t next, RankState state) {
  RankReport report;
  report.state = state;
  for (int64_t id = 0; id < 2; ++id) {
    LedgerState& own = report.models.emplace_back();
    own.id = id;
    own.next = id == model ? next : 0;
    own.waiting = id == model ? waiting : -1;
  }
  return report;
}

} // namespace

void register_roll_call(py::module_& module) {
  py::class_<CountingStore, c10::intrusive_ptr<CountingStore>>(module, "CountingStore")
      .def(py::init([] { return c10::make_intrusive<CountingStore>(); }))
      .def_readwrite("num_requests", &CountingStore::num_requests)
      .def_readwrite("num_bytes", &CountingStore::num_bytes);
  py::class_<RollCall, std::unique_ptr<RollCall>>(module, "RollCall")
      .def(
          py::init([](const c10::intrusive_ptr<CountingStore>& store, size_t rank, size_t size) {
            return std::make_unique<RollCall>(store, "model", rank, size);
          }),
          py::arg("store"),
          py::arg("rank"),
          py::arg("size"))
      .def(
          "step",
          [](RollCall& self, bool wants, int64_t waiting, const std::string& unit) {
            return self.step(
                wants,
                [&] { return report_of(waiting, unit); },
                [](const auto& reports) { return describe(reports, {{0, {}}}, ""); });
          },
          py::arg("wants"),
          py::arg("waiting"),
          py::arg("unit"))
      .def(
          "note_end",
          [](RollCall& self, const std::string& error) {
            RankReport report;
            report.state = RankState::Ended;
            report.error = error;
            self.note_end(report.encode(), /*behind_alarm=*/false);
          },
          py::arg("error"));
  py::enum_<RankState>(module, "RankState")
      .value("Silent", RankState::Silent)
      .value("Lives", RankState::Lives)
      .value("Ended", RankState::Ended);
  py::class_<RankReport>(module, "RankReport")
      .def(
          py::init(&state_of),
          py::arg("model"),
          py::arg("waiting"),
          py::arg("next"),
          py::arg("state") = RankState::Lives);
  module.def("is_deadlock", &is_deadlock, py::arg("reports"));
}

} // namespace zerocore

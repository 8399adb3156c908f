// Ranks that tell each other where they are, through a store that counts their requests.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <memory>
#include <optional>
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
  report.answered = true;
  report.entries = {{waiting, false, "all_gather of '" + unit + "' (8 bytes)"}};
  report.waiting = waiting;
  report.groups = {{"model", waiting + 1, waiting, 1, unit}};
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
          "poll",
          [](RollCall& self, bool asks, bool must_end, int64_t waiting, const std::string& unit)
              -> std::optional<std::string> {
            return self.poll(
                asks,
                must_end,
                [&] { return report_of(waiting, unit); },
                [](const auto& reports, bool ends) {
                  return ends || wait_for_ever(reports) ? describe(reports, {}, "", "") : "";
                });
          },
          py::kw_only(),
          py::arg("asks") = false,
          py::arg("must_end") = false,
          py::arg("waiting") = 7,
          py::arg("unit") = "even")
      .def("note_end", &RollCall::note_end, py::arg("how"));
}

} // namespace zerocore

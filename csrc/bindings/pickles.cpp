// Reads pickles of checkpoints for zerocore/checkpoint/safe_pickles.py, which says what a name in a
// pickle stands for. Nothing of the pickle is run, and memory grows with the bytes of the pickle
// alone.
#include <pybind11/pybind11.h>

#include <bit>
#include <cstdint>
#include <iterator>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "bindings/bindings.h"
#include "bindings/pickle_bytes.h"

namespace py = pybind11;

namespace zerocore {

namespace {

struct PickleTypes {
  py::object find; // gives a maker for the names of a module and of what is in it
  py::object persistent; // gives a value for a persistent id; None where there are none
  py::object maker, opaque; // the classes Maker and Opaque of safe_pickles.py
  py::object make_empty; // object.__new__
};

bool is_plain(py::handle value) {
  const PyObject* object = value.ptr();
  return object == Py_None || PyUnicode_CheckExact(object) || PyLong_CheckExact(object) ||
      PyBool_Check(object) || PyFloat_CheckExact(object) || PyBytes_CheckExact(object);
}

// Hashing a key must end: a tuple of plain values may be one, a tuple of tuples may not.
bool is_flat(py::handle key) {
  if (!PyTuple_CheckExact(key.ptr())) {
    return false;
  }
  for (py::handle item : py::reinterpret_borrow<py::tuple>(key)) {
    if (!is_plain(item)) {
      return false;
    }
  }
  return true;
}

py::object as_text(std::string_view text) {
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr);
  if (made == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(made);
}

// As many bytes as an integer has, least significant first, two's complement.
py::object as_integer(std::string_view digits) {
  return py::type::of(py::int_(0))
      .attr("from_bytes")(
          py::bytes(digits.data(), digits.size()), "little", py::arg("signed") = true);
}

// Most significant first.
double as_double(std::string_view bytes) {
  uint64_t bits = 0;
  for (const char byte : bytes) {
    bits = bits << 8 | static_cast<uint8_t>(byte);
  }
  return std::bit_cast<double>(bits);
}

// The stack, the marks and the memo of a pickle.
class PickleMachine {
 public:
  PickleMachine(std::string_view data, PickleTypes types) : data_(data), types_(std::move(types)) {}

  py::object run() {
    char code = 0;
    while ((code = data_.take(1)[0]) != '.') {
      if (!run_value(code) && !run_stack(code) && !run_object(code)) {
        refuse("it has an opcode that no checkpoint needs");
      }
    }
    if (!empty_.empty() || stack_.size() != 1) {
      refuse("it ends too early");
    }
    return stack_[0];
  }

 private:
  // A value by itself.
  bool run_value(char code) {
    switch (code) {
      case 'K':
        return push(py::int_(data_.number(1)));
      case 'M':
        return push(py::int_(data_.number(2)));
      case 'J':
        return push(py::int_(static_cast<int32_t>(data_.number(4))));
      case '\x8a':
        return push(as_integer(data_.counted(1)));
      case 'G':
        return push(py::float_(as_double(data_.take(8))));
      case 'X':
        return push(as_text(data_.counted(4)));
      case '\x8c':
        return push(as_text(data_.counted(1)));
      case 'C':
        return push(py::bytes(data_.counted(1)));
      case 'B':
        return push(py::bytes(data_.counted(4)));
      case 'N':
        return push(py::none());
      case '\x88':
        return push(py::bool_(true));
      case '\x89':
        return push(py::bool_(false));
      case ')':
        return push(py::tuple());
      case '}':
        return push(py::dict());
      case ']':
        return push(py::list());
      default:
        return false;
    }
  }

  // Values that are on the stack or in the memo.
  bool run_stack(char code) {
    switch (code) {
      case '\x80': // the protocol
        return !data_.take(1).empty();
      case '\x95': // a frame
        return !data_.take(8).empty();
      case '(':
        marks_.push_back(stack_.size());
        return true;
      case '\x94':
        return put(static_cast<uint32_t>(memo_.size()));
      case 'q':
        return put(data_.number(1));
      case 'r':
        return put(data_.number(4));
      case 'h':
        return get(data_.number(1));
      case 'j':
        return get(data_.number(4));
      case '\x85':
      case '\x86':
      case '\x87':
        return push_tuple(popped(static_cast<size_t>(code - '\x84')));
      case 't':
        return push_tuple(marked());
      case 'a':
        return append(popped(1));
      case 'e':
        return append(marked());
      case 's':
        return set_items(popped(2));
      case 'u':
        return set_items(marked());
      default:
        return false;
    }
  }

  // Objects of classes, by what makes them.
  bool run_object(char code) {
    switch (code) {
      case 'c': {
        const py::object module = as_text(data_.line());
        return push(types_.find(module, as_text(data_.line())));
      }
      case '\x93': {
        const std::vector<py::object> names = popped(2);
        if (!py::isinstance<py::str>(names[0]) || !py::isinstance<py::str>(names[1])) {
          refuse("the name of a class is no text");
        }
        return push(types_.find(names[0], names[1]));
      }
      case 'R':
        return reduce();
      case '\x81':
        return make();
      case 'b':
        return build();
      case 'Q':
        if (types_.persistent.is_none()) {
          refuse("it names a storage");
        }
        return push(types_.persistent(pop()));
      default:
        return false;
    }
  }

  bool push(py::object value) {
    stack_.push_back(std::move(value));
    return true;
  }
  py::object& top() {
    if (stack_.empty()) {
      refuse("its stack is empty");
    }
    return stack_.back();
  }
  py::object pop() {
    py::object value = std::move(top());
    stack_.pop_back();
    return value;
  }
  std::vector<py::object> popped(size_t count) {
    if (count > stack_.size()) {
      refuse("its stack is empty");
    }
    const auto first = stack_.end() - static_cast<ptrdiff_t>(count);
    std::vector<py::object> values(
        std::make_move_iterator(first), std::make_move_iterator(stack_.end()));
    stack_.erase(first, stack_.end());
    return values;
  }
  std::vector<py::object> marked() {
    if (marks_.empty() || marks_.back() > stack_.size()) {
      refuse("it has no mark");
    }
    const size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return popped(count);
  }
  bool put(uint32_t index) {
    memo_[index] = top();
    return true;
  }
  bool get(uint32_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) {
      refuse("it reads a place that nothing was put in");
    }
    return push(found->second);
  }
  bool push_tuple(const std::vector<py::object>& values) {
    py::tuple made(values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      made[i] = values[i];
    }
    return push(std::move(made));
  }

  bool is_opaque(const py::object& value) const {
    return py::type::of(value).is(types_.opaque);
  }
  bool append(const std::vector<py::object>& values) {
    if (is_opaque(top())) {
      return true;
    }
    if (!PyList_CheckExact(top().ptr())) {
      refuse("it appends to what is no list");
    }
    auto list = py::reinterpret_borrow<py::list>(top());
    for (const py::object& value : values) {
      list.append(value);
    }
    return true;
  }
  bool set_items(const std::vector<py::object>& pairs) {
    const bool is_dict = PyDict_CheckExact(top().ptr());
    if ((!is_dict && !is_opaque(top())) || pairs.size() % 2 != 0) {
      refuse("it sets items of what is no dict");
    }
    for (size_t i = 0; i < pairs.size(); i += 2) {
      const py::object& key = pairs[i];
      const bool is_nested = PyTuple_Check(key.ptr()) && !is_flat(key);
      if (is_nested || py::isinstance(key, types_.maker) || empty_.contains(key.ptr())) {
        refuse("a key is neither plain nor flat");
      }
      if (is_dict && PyDict_SetItem(top().ptr(), key.ptr(), pairs[i + 1].ptr()) != 0) {
        throw py::error_already_set();
      }
    }
    return true;
  }

  // The attribute of a maker; refuses other values and makers that have none.
  py::object of_maker(const py::object& maker, const char* name, const char* why) const {
    py::object found = py::none();
    if (py::isinstance(maker, types_.maker)) {
      found = maker.attr(name);
    }
    if (found.is_none()) {
      refuse(why);
    }
    return found;
  }
  bool reduce() {
    const py::object args = pop();
    const py::object call = of_maker(pop(), "call", "it calls what is no function of a checkpoint");
    if (!PyTuple_CheckExact(args.ptr())) {
      refuse("it calls a function with no tuple");
    }
    return push(call(*args));
  }
  bool make() {
    pop(); // its arguments: there are none
    const py::object maker = pop();
    const py::object kind = of_maker(maker, "kind", "it makes an object that no checkpoint needs");
    py::object made = types_.make_empty(kind);
    if (!maker.attr("build").is_none()) {
      empty_.emplace(made.ptr(), Unfilled{made, maker.attr("build")});
    }
    return push(std::move(made));
  }
  bool build() {
    const py::object state = pop();
    if (is_opaque(top())) {
      return true;
    }
    const auto found = empty_.find(top().ptr());
    if (found == empty_.end()) {
      refuse("it sets attributes of what has none to set");
    }
    const Unfilled unfilled = std::move(found->second);
    empty_.erase(found);
    unfilled.build(unfilled.object, state);
    return true;
  }

  // An object that is not filled yet. It is kept, so that its address stays its own.
  struct Unfilled {
    py::object object, build;
  };

  PickleBytes data_;
  PickleTypes types_;
  std::vector<py::object> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, py::object> memo_;
  std::unordered_map<PyObject*, Unfilled> empty_;
};

} // namespace

void register_pickles(py::module_& module) {
  module.def(
      "read_pickle",
      [](const py::bytes& data,
         py::object find,
         py::object persistent,
         py::object maker,
         py::object opaque) {
        const py::object make_empty =
            py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyBaseObject_Type))
                .attr("__new__");
        return PickleMachine(
                   std::string_view(data),
                   {std::move(find),
                    std::move(persistent),
                    std::move(maker),
                    std::move(opaque),
                    make_empty})
            .run();
      },
      py::arg("data"),
      py::arg("find"),
      py::arg("persistent"),
      py::arg("maker"),
      py::arg("opaque"));
}

} // namespace zerocore

// Structs that Python constructs by keyword. Each name is written once, beside its member, and the
// defaults are the struct's own.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace zerocore {

// A type whose constructor fills a Given from its arguments and returns `convert` of it. A
// TypeError names the argument that is unknown, missing, given twice or of another type. The stubs
// say which arguments may be positional.
template <typename T, typename Given = T>
class KeywordType : public pybind11::class_<T> {
 public:
  KeywordType(
      const pybind11::module_& module,
      const char* name,
      const std::function<T(const Given&)>& convert = std::identity())
      : pybind11::class_<T>(module, name) {
    using pybind11::args, pybind11::kwargs;
    this->def(pybind11::init([=, fields = fields_](const args& values, const kwargs& named) {
      return convert(make(name, *fields, values, named));
    }));
  }
  // Adds the next field, with the struct's default. `members` lead to it from a Given, also through
  // nested structs. Python can read the fields of the type itself.
  template <typename... Members>
  KeywordType& takes(const char* name, Members... members) {
    const auto set = [members...](Given& owner, const pybind11::handle& value) {
      auto& field = (owner.*....*members);
      field = value.cast<std::remove_reference_t<decltype(field)>>();
    };
    fields_->push_back({name, set});
    if constexpr (std::is_same_v<T, Given> && sizeof...(members) == 1) {
      this->def_readonly(name, members...);
    }
    return *this;
  }
  // Adds the next field, without a default.
  template <typename... Members>
  KeywordType& needs(const char* name, Members... members) {
    takes(name, members...);
    fields_->back().is_needed = true;
    return *this;
  }

 private:
  struct Field {
    std::string name;
    std::function<void(Given&, const pybind11::handle&)> set;
    bool is_needed = false;
  };
  using Fields = std::vector<Field>;

  static Given make(
      const std::string& type,
      const Fields& fields,
      const pybind11::args& args,
      const pybind11::kwargs& kwargs) {
    const auto check = [&](bool is_so, const char* what, const std::string& name) {
      if (!is_so) {
        throw pybind11::type_error(type + "() " + what + " '" + name + "'");
      }
    };
    std::vector<pybind11::handle> values(args.begin(), args.end());
    check(values.size() <= fields.size(), "takes no argument after", fields.back().name);
    values.resize(fields.size());
    for (const auto& [key, value] : kwargs) {
      const auto name = key.template cast<std::string>();
      const auto field = std::ranges::find(fields, name, &Field::name);
      check(field != fields.end(), "has no argument", name);
      check(!std::exchange(values[field - fields.begin()], value), "has two values for", name);
    }
    Given given{};
    for (size_t i = 0; i < fields.size(); ++i) {
      check(values[i] || !fields[i].is_needed, "needs", fields[i].name);
      try {
        values[i] ? fields[i].set(given, values[i]) : void();
      } catch (const pybind11::cast_error&) {
        check(false, "has a value of another type for", fields[i].name);
      }
    }
    return given;
  }

  std::shared_ptr<Fields> fields_ = std::make_shared<Fields>();
};

} // namespace zerocore

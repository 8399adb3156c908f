// The text of an error.
#pragma once

#include <c10/util/Exception.h>

#include <exception>

namespace zerocore {

// Without the stack that torch's errors have.
inline const char* message_of(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  return torch_error == nullptr ? error.what() : torch_error->what_without_backtrace();
}

} // namespace zerocore

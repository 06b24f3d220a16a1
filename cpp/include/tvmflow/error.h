// The one kind of error: what a user can act on, as one sentence.
#pragma once

#include <stdexcept>

namespace tvmflow {

// A bundle that cannot be trusted or run here, an input that does not fit, or a file that cannot be read or written.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace tvmflow

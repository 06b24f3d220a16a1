// The one kind of error: what a user can act on, as one sentence.
#pragma once

#include <stdexcept>

namespace tvmflow {

// A bundle that cannot be trusted or run here, an input that does not fit, or a file that cannot be read or written.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A bundle that may be sound and cannot be used here all the same.
class Unusable : public Error {
 public:
  using Error::Error;
};

}  // namespace tvmflow

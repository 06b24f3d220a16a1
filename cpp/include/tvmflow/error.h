// The errors of the library: each message is one sentence that says what is wrong and what to do.
#pragma once

#include <stdexcept>

namespace tvmflow {

// A bundle that is damaged or that this machine cannot run, an input that does not fit the model, or a file that
// cannot be read or written.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A bundle that may be intact but cannot be opened here: another version of the format, or no space to unpack it.
class Unusable : public Error {
 public:
  using Error::Error;
};

}  // namespace tvmflow

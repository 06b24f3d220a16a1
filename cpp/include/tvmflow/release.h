// The release to which a bundle has to belong.
#pragma once

#include <string>

namespace tvmflow {

// A release, and the file with the statement that a trusted key has signed on it.
//
// The address is `release://NAME@CHANNEL` or `release://NAME/VERSION`. The file is a copy of the release store's: for a
// channel its document, `channels/NAME/CHANNEL.json`, for a version `releases/NAME/VERSION/statement.json`.
struct SignedRelease {
  std::string address;
  std::string statement;
};

}  // namespace tvmflow

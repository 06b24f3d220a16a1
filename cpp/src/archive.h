// Opening bundles safely.
#pragma once

#include <filesystem>
#include <string>

#include "tvmflow/manifest.h"

namespace tvmflow {

// A folder that goes with this object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// Extracts a `.tar.gz` bundle into an empty folder: the regular files that its manifest names and nothing else. What
// they hold is not checked.
void Unpack(const std::string& bundle, const std::filesystem::path& folder);

// Checks an unpacked bundle: that each file is what the manifest says. `source` names the bundle in errors.
Manifest Verify(const std::filesystem::path& folder, const std::string& source);

}  // namespace tvmflow

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
// they hold is not checked, nor is a signature.
void Unpack(const std::string& bundle, const std::filesystem::path& folder);

// Checks that each file of a bundle unpacked into `folder` is what its manifest says.
Manifest Verify(const std::filesystem::path& folder, const std::string& bundle);

// The file with the weights of a bundle that keeps them apart: in its folder, else beside the bundle by their digest.
std::filesystem::path WeightsPath(const Manifest& manifest, const std::filesystem::path& folder,
                                  const std::string& bundle);

}  // namespace tvmflow

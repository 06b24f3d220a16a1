// Opening bundles safely.
#pragma once

#include <filesystem>
#include <optional>
#include <string>

#include "signature.h"
#include "tvmflow/manifest.h"
#include "tvmflow/release.h"

namespace tvmflow {

// A new folder among the temporary ones, removed with this object.
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

// A bundle whose files lie in a folder, unpacked there if the bundle is an archive, and equal their digests.
class OpenBundle {
 public:
  // `bundle` is an archive or a folder. Throws Error for anything but an intact bundle, and, where TVMFLOW_TRUSTED_KEYS
  // names public keys, for one that none of them has signed. With a `release`, throws Error for a bundle that is not one
  // of it by its signed statement. Nothing of the bundle is executed.
  explicit OpenBundle(const std::string& bundle, const std::optional<SignedRelease>& release = std::nullopt);

  const Manifest& manifest() const { return manifest_; }

  // The path of a file that the manifest names. Weights that are not in the bundle's folder lie beside the bundle in a
  // file that their digest names.
  std::filesystem::path PathOf(const std::string& file) const;

 private:
  void Unpack(const TrustedKeys& trusted);
  void ReadFolder(const TrustedKeys& trusted);
  void CheckDigests() const;

  std::string bundle_;
  std::optional<TemporaryFolder> unpacked_;
  std::filesystem::path folder_;
  Manifest manifest_;
};

}  // namespace tvmflow

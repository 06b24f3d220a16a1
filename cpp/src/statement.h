// Signed statements on releases and channels: in-toto Statements in DSSE envelopes, as Python signs them.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>

#include "signature.h"
#include "tvmflow/release.h"

namespace tvmflow {

// A statement that holds: a trusted key has signed it, it is about the release that was asked for, and it has not
// expired.
class Statement {
 public:
  // Throws Error, in one sentence that names the file, for a statement that does not hold.
  Statement(const SignedRelease& release, const TrustedKeys& trusted);

  // Throws Error unless the file `archive` is one of the release's, by its SHA-256.
  void CheckArchive(const std::string& archive) const;
  // Throws Error unless a bundle of this name is one of the release's model.
  void CheckName(const std::string& bundle, const std::string& name) const;
  // Keeps the number of a channel's statement as the highest that this machine has seen. Throws Error when it has seen a
  // higher one: somebody has put an older statement in the place of a newer one.
  void Remember() const;

 private:
  void Read(const TrustedKeys& trusted);

  SignedRelease release_;
  std::string name_;
  // Either of the two is empty.
  std::string channel_, version_;
  std::set<std::string> digests_;
  int64_t number_ = 0;
};

}  // namespace tvmflow

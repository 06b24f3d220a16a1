// Signatures, Ed25519: a bundle's is over the manifest, whose digests cover all other files.
#pragma once

#include <openssl/evp.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tvmflow {

using PublicKey = std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)>;

// The public keys that this machine trusts, by their 64 hexadecimal digits.
class TrustedKeys {
 public:
  // Reads the files of the list TVMFLOW_TRUSTED_KEYS, in PEM. Throws Error for a file without an Ed25519 key, and for a
  // list that is not empty and names no file.
  TrustedKeys();

  // Throws Error for a signature in another form than tvmflow's, and Unusable unless one of the keys has signed the
  // manifest. `signature` is the content of the file `bundle.sig`; without trusted keys none is needed.
  void Check(const std::string& manifest, const std::optional<std::string>& signature) const;

  // Throws Unusable unless the trusted key of these hexadecimal digits has signed the message.
  void Verify(const std::string& key, const std::string& message, const std::vector<unsigned char>& signature) const;

  bool empty() const { return keys_.empty(); }

 private:
  std::map<std::string, PublicKey> keys_;
};

}  // namespace tvmflow

// SHA-256 digests.
#pragma once

#include <openssl/evp.h>

#include <cstddef>
#include <memory>
#include <string>

#include "bytes.h"

namespace tvmflow {

class Sha256 {
 public:
  Sha256() : state_(EVP_MD_CTX_new(), EVP_MD_CTX_free) { EVP_DigestInit_ex(state_.get(), EVP_sha256(), nullptr); }
  void Update(const void* data, size_t size) { EVP_DigestUpdate(state_.get(), data, size); }
  // The digest of all bytes so far, in hexadecimal. No method may be called after it.
  std::string Finish();

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> state_;
};

// The digest of a whole file, in hexadecimal. Throws Error if it cannot be read.
std::string DigestOf(InputFile& file);

}  // namespace tvmflow

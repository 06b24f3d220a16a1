// SHA-256 digests.
#pragma once

// OpenSSL's own interface to one algorithm, of before its version 3: the general one (EVP) would link every cipher into
// a static program, 3.8 MB of them.
#define OPENSSL_API_COMPAT 0x10100000L
#include <openssl/sha.h>

#include <cstddef>
#include <string>

namespace tvmflow {

class Sha256 {
 public:
  Sha256() { SHA256_Init(&state_); }
  void Update(const void* data, size_t size) { SHA256_Update(&state_, data, size); }
  // The digest of all bytes so far, in hexadecimal. No method may be called after it.
  std::string Finish();

 private:
  SHA256_CTX state_;
};

}  // namespace tvmflow

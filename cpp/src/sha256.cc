#include "sha256.h"

#include "text.h"

namespace tvmflow {

std::string Sha256::Finish() {
  unsigned char digest[EVP_MAX_MD_SIZE] = {};
  unsigned int size = 0;
  EVP_DigestFinal_ex(state_.get(), digest, &size);
  return Hexadecimal(digest, size);
}

}  // namespace tvmflow

#include "sha256.h"

#include <algorithm>
#include <vector>

#include "text.h"

namespace tvmflow {

std::string Sha256::Finish() {
  unsigned char digest[EVP_MAX_MD_SIZE] = {};
  unsigned int size = 0;
  EVP_DigestFinal_ex(state_.get(), digest, &size);
  return Hexadecimal(digest, size);
}

std::string DigestOf(InputFile& file) {
  constexpr uint64_t kChunk = 1 << 20;
  Sha256 digest;
  FileSection content(file, 0, file.size());
  std::vector<char> chunk(static_cast<size_t>(std::min(file.size(), kChunk)));
  while (content.remaining() > 0) {
    const size_t count = static_cast<size_t>(std::min<uint64_t>(content.remaining(), chunk.size()));
    content.Read(chunk.data(), count);
    digest.Update(chunk.data(), count);
  }
  return digest.Finish();
}

}  // namespace tvmflow

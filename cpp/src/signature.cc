#include "signature.h"

#include <openssl/pem.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "bytes.h"
#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

constexpr size_t kKeySize = 32, kSignatureSize = 64;
constexpr uint64_t kMaxKeyFile = 1 << 14;

// The bytes that lower-case hexadecimal digits stand for.
std::vector<unsigned char> Bytes(const std::string& digits) {
  const auto value = [](char digit) { return digit <= '9' ? digit - '0' : digit - 'a' + 10; };
  std::vector<unsigned char> bytes;
  for (size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<unsigned char>(value(digits[i]) * 16 + value(digits[i + 1])));
  }
  return bytes;
}

// The key and the signature, in hexadecimal digits, of a line `ed25519 KEY SIGNATURE`. Throws Error for another form.
std::pair<std::string, std::string> Parse(const std::string& line) {
  static const std::string kAlgorithm = "ed25519 ";
  const size_t key = kAlgorithm.size(), signature = key + 2 * kKeySize + 1, end = signature + 2 * kSignatureSize;
  const auto is_hexadecimal = [&line](size_t begin, size_t size) {
    return line.find_first_not_of("0123456789abcdef", begin) >= begin + size;
  };
  if (line.size() != end + 1 || line.compare(0, key, kAlgorithm) != 0 || !is_hexadecimal(key, 2 * kKeySize) ||
      line[signature - 1] != ' ' || !is_hexadecimal(signature, 2 * kSignatureSize) || line[end] != '\n') {
    throw Error("its signature is damaged");
  }
  return {line.substr(key, 2 * kKeySize), line.substr(signature, 2 * kSignatureSize)};
}

// Reads a public key, or the public part of a private one, as Python's `signature.load_public` does.
PublicKey Load(const std::string& path) {
  std::string text;
  try {
    InputFile file(path);
    text.resize(static_cast<size_t>(std::min<uint64_t>(file.size(), kMaxKeyFile)));
    file.Read(0, text.data(), text.size());
  } catch (const Error& error) {
    throw Error("key '" + path + "' cannot be read (" + error.what() + "); `tvmflow keygen` makes a pair");
  }
  const std::unique_ptr<BIO, int (*)(BIO*)> stream(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())),
                                                   BIO_free);
  // A key with a password is refused: nobody could be asked for it.
  const auto no_password = [](char*, int, int, void*) { return -1; };
  const bool is_private = text.find("PRIVATE KEY") != std::string::npos;
  PublicKey key(is_private ? PEM_read_bio_PrivateKey(stream.get(), nullptr, no_password, nullptr)
                           : PEM_read_bio_PUBKEY(stream.get(), nullptr, no_password, nullptr),
                EVP_PKEY_free);
  if (key == nullptr || EVP_PKEY_base_id(key.get()) != EVP_PKEY_ED25519) {
    throw Error("'" + path + "' is no Ed25519 key in PEM without a password; `tvmflow keygen` makes a pair");
  }
  return key;
}

bool Verifies(EVP_PKEY* key, const std::string& message, const std::vector<unsigned char>& signature) {
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context(EVP_MD_CTX_new(), EVP_MD_CTX_free);
  return EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key) == 1 &&
         EVP_DigestVerify(context.get(), signature.data(), signature.size(),
                          reinterpret_cast<const unsigned char*>(message.data()), message.size()) == 1;
}

}  // namespace

TrustedKeys::TrustedKeys() {
  const char* variable = std::getenv("TVMFLOW_TRUSTED_KEYS");
  const std::string value = variable == nullptr ? "" : variable;
  const std::string list = value + ':';
  for (size_t begin = 0, end; (end = list.find(':', begin)) != std::string::npos; begin = end + 1) {
    if (end == begin) continue;
    PublicKey key = Load(list.substr(begin, end - begin));
    std::array<unsigned char, kKeySize> raw;
    size_t size = raw.size();
    if (EVP_PKEY_get_raw_public_key(key.get(), raw.data(), &size) != 1) throw Error("a trusted key has no public part");
    keys_.emplace(Hexadecimal(raw.data(), size), std::move(key));
  }
  if (!value.empty() && keys_.empty()) {
    throw Error("TVMFLOW_TRUSTED_KEYS is '" + value +
                "', which names no key; name the files of public keys, or unset it to accept what nobody has signed");
  }
}

void TrustedKeys::Check(const std::string& manifest, const std::optional<std::string>& signature) const {
  if (!signature.has_value()) {
    if (keys_.empty()) return;
    throw Unusable(
        "it is not signed, and this machine accepts signed bundles only; sign it with `tvmflow sign`, or take a signed "
        "one");
  }
  const auto [name, digits] = Parse(*signature);
  if (!keys_.empty()) Verify(name, manifest, Bytes(digits));
}

void TrustedKeys::Verify(const std::string& key, const std::string& message,
                         const std::vector<unsigned char>& signature) const {
  const auto trusted = keys_.find(key);
  if (trusted == keys_.end()) {
    throw Unusable("it is signed with the key " + key.substr(0, 16) +
                   ", which is not trusted here; take one signed with a trusted key, or add that key to "
                   "TVMFLOW_TRUSTED_KEYS");
  }
  if (!Verifies(trusted->second.get(), message, signature)) {
    throw Unusable("it was changed after it was signed; do not trust it");
  }
}

}  // namespace tvmflow

#include "bundle.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "archive.h"
#include "bytes.h"
#include "sha256.h"
#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "bundle.json";
constexpr const char* kSignature = "bundle.sig";
constexpr const char* kWeights = "mod.params";
constexpr uint64_t kMaxManifest = 1 << 20;
constexpr size_t kChunk = 1 << 20;

// Returns what `call` returns; the name of the bundle is added to its errors.
template <typename Call>
auto WithBundleName(const std::string& bundle, const Call& call) {
  try {
    return call();
  } catch (const Unusable& error) {
    throw Error("bundle '" + bundle + "' cannot be used: " + error.what());
  } catch (const Error& error) {
    throw Error("'" + bundle + "' is not a bundle or is damaged (" + error.what() + "); fetch it again");
  }
}

void Extract(BundleArchive& archive, const fs::path& path) {
  OutputFile file(path.string());
  archive.Read([&file](const void* data, size_t size) { file.Write(data, size); });
  file.Close();
}

// Throws Error unless the current member is a signature: `ed25519`, a key of 64 and a signature of 128 hexadecimal
// digits. Whether the key has made it is not checked.
void ReadSignature(BundleArchive& archive) {
  static const std::string kAlgorithm = "ed25519 ";
  constexpr size_t kKey = 64, kDigits = 128;
  const size_t size = kAlgorithm.size() + kKey + 1 + kDigits + 1;
  if (archive.size() != size) throw Error("its signature is damaged");
  std::string text;
  archive.Read([&text](const void* data, size_t count) { text.append(static_cast<const char*>(data), count); });
  const auto is_hexadecimal = [&text](size_t begin, size_t count) {
    return text.find_first_not_of("0123456789abcdef", begin) >= begin + count;
  };
  const size_t key = kAlgorithm.size(), digits = key + kKey + 1;
  if (text.compare(0, key, kAlgorithm) != 0 || !is_hexadecimal(key, kKey) || text[digits - 1] != ' ' ||
      !is_hexadecimal(digits, kDigits) || text.back() != '\n') {
    throw Error("its signature is damaged");
  }
}

void CheckFreeSpace(const Manifest& manifest, const fs::path& folder) {
  std::error_code error;
  const uintmax_t available = fs::space(folder, error).available;
  uintmax_t needed = 0;
  for (const auto& [name, entry] : manifest.files) {
    const uintmax_t size = static_cast<uintmax_t>(entry.size);
    needed = size > UINTMAX_MAX - needed ? UINTMAX_MAX : needed + size;
  }
  if (error || needed <= available) return;
  throw Unusable("it needs " + std::to_string(needed >> 20) + " MiB in '" + folder.string() + "', " +
                 std::to_string(available >> 20) + " MiB are free");
}

void CheckDigest(const fs::path& path, const FileEntry& entry) {
  InputFile file(path.string());
  Sha256 digest;
  if (file.size() == static_cast<uint64_t>(entry.size)) {
    FileSection content(file, 0, file.size());
    std::vector<char> chunk(kChunk);
    while (content.remaining() > 0) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(content.remaining(), kChunk));
      content.Read(chunk.data(), count);
      digest.Update(chunk.data(), count);
    }
    if (digest.Finish() == entry.sha256) return;
  }
  throw Error("it is not what the manifest says");
}

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  fs::path parent = fs::temp_directory_path(error);
  if (error) parent = "/tmp";
  std::string pattern = (parent / "tvmflow-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw Error("no folder can be created in '" + parent.string() + "'; set TMPDIR to another one");
  }
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

OpenBundle::OpenBundle(const std::string& bundle) : bundle_(bundle), folder_(bundle) {
  const char* trusted_keys = std::getenv("TVMFLOW_TRUSTED_KEYS");
  if (trusted_keys != nullptr && *trusted_keys != '\0') {
    throw Error("TVMFLOW_TRUSTED_KEYS is set and this program checks no signatures; check it with `tvmflow verify`");
  }
  std::error_code ignored;
  if (!fs::exists(folder_, ignored)) throw Error("there is no bundle '" + bundle + "'");
  WithBundleName(bundle_, [this, &ignored] {
    if (fs::is_directory(folder_, ignored)) {
      ReadManifest();
    } else {
      unpacked_.emplace();
      folder_ = unpacked_->path();
      Unpack();
    }
  });
  CheckDigests();
}

void OpenBundle::ReadManifest() {
  const fs::path path = folder_ / kManifest;
  if (!fs::exists(path)) throw Error(std::string("it has no ") + kManifest);
  InputFile file(path.string());
  if (file.size() > kMaxManifest) throw Error(std::string("its ") + kManifest + " is too large");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.Read(0, text.data(), text.size());
  manifest_ = ParseManifest(text);
}

// Extracts the regular files that the manifest names. The archive must hold those and nothing else: first the manifest,
// then perhaps a signature.
void OpenBundle::Unpack() {
  BundleArchive archive(bundle_);
  if (!archive.Next() || archive.name() != kManifest) throw Error(std::string("it does not begin with ") + kManifest);
  if (archive.size() > kMaxManifest) throw Error(std::string("its ") + kManifest + " is too large");
  Extract(archive, folder_ / kManifest);
  ReadManifest();
  CheckFreeSpace(manifest_, folder_);
  std::map<std::string, FileEntry> missing = manifest_.files;
  bool has_member = archive.Next();
  if (has_member && archive.name() == kSignature) {
    ReadSignature(archive);
    has_member = archive.Next();
  }
  for (; has_member; has_member = archive.Next()) {
    const auto entry = missing.find(archive.name());
    if (entry == missing.end() || static_cast<uint64_t>(entry->second.size) != archive.size()) {
      throw Error("its manifest does not describe its file '" + Escape(archive.name()) + "'");
    }
    missing.erase(entry);
    Extract(archive, folder_ / archive.name());
  }
  missing.erase(kWeights);  // they may lie beside the bundle
  if (!missing.empty()) throw Error("it lacks " + missing.begin()->first);
}

fs::path OpenBundle::PathOf(const std::string& file) const {
  const fs::path path = folder_ / file;
  std::error_code ignored;
  if (file != kWeights || fs::exists(path, ignored)) return path;
  return fs::absolute(bundle_).lexically_normal().parent_path() / manifest_.files.at(file).sha256;
}

void OpenBundle::CheckDigests() const {
  for (const auto& [name, entry] : manifest_.files) {
    const fs::path path = PathOf(name);
    try {
      CheckDigest(path, entry);
    } catch (const Error& error) {
      const std::string place = path.parent_path() == folder_ ? name : path.string();
      throw Error("bundle '" + bundle_ + "': " + place + " cannot be used (" + error.what() + "); fetch it again");
    }
  }
}

Manifest VerifyBundle(const std::string& bundle) { return OpenBundle(bundle).manifest(); }

}  // namespace tvmflow

#include "bundle.h"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <optional>

#include "archive.h"
#include "bytes.h"
#include "sha256.h"
#include "statement.h"
#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "bundle.json";
constexpr const char* kSignature = "bundle.sig";
constexpr const char* kWeights = "mod.params";
constexpr uint64_t kMaxManifest = 1 << 20;
constexpr uint64_t kMaxSignature = 1 << 10;

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

// The content of the current member, a signature.
std::string ReadSignature(BundleArchive& archive) {
  if (archive.size() > kMaxSignature) throw Error("its signature is damaged");
  std::string text;
  archive.Read([&text](const void* data, size_t count) { text.append(static_cast<const char*>(data), count); });
  return text;
}

// The content of a file of at most `limit` bytes in an unpacked bundle. Throws Error.
std::string ReadFile(const fs::path& path, uint64_t limit) {
  InputFile file(path.string());
  if (file.size() > limit) throw Error("its " + path.filename().string() + " is too large");
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.Read(0, text.data(), text.size());
  return text;
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
  if (file.size() != static_cast<uint64_t>(entry.size) || DigestOf(file) != entry.sha256) {
    throw Error("it is not what the manifest says");
  }
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

OpenBundle::OpenBundle(const std::string& bundle, const std::optional<SignedRelease>& release)
    : bundle_(bundle), folder_(bundle) {
  const TrustedKeys trusted;
  std::error_code ignored;
  if (!fs::exists(folder_, ignored)) throw Error("there is no bundle '" + bundle + "'");
  std::optional<Statement> statement;
  if (release) statement.emplace(*release, trusted).CheckArchive(bundle);
  WithBundleName(bundle_, [this, &ignored, &trusted] {
    if (fs::is_directory(folder_, ignored)) {
      ReadFolder(trusted);
    } else {
      unpacked_.emplace();
      folder_ = unpacked_->path();
      Unpack(trusted);
    }
  });
  if (statement) statement->CheckName(bundle, manifest_.name);
  CheckDigests();
  if (statement) statement->Remember();
}

void OpenBundle::ReadFolder(const TrustedKeys& trusted) {
  const fs::path path = folder_ / kManifest, signature_path = folder_ / kSignature;
  if (!fs::exists(path)) throw Error(std::string("it has no ") + kManifest);
  const std::string manifest = ReadFile(path, kMaxManifest);
  std::optional<std::string> signature;
  if (fs::exists(signature_path)) signature = ReadFile(signature_path, kMaxSignature);
  trusted.Check(manifest, signature);
  manifest_ = ParseManifest(manifest);
}

// Extracts the regular files that the manifest names. The archive must hold those and nothing else: first the manifest,
// then perhaps a signature.
void OpenBundle::Unpack(const TrustedKeys& trusted) {
  BundleArchive archive(bundle_);
  if (!archive.Next() || archive.name() != kManifest) throw Error(std::string("it does not begin with ") + kManifest);
  if (archive.size() > kMaxManifest) throw Error(std::string("its ") + kManifest + " is too large");
  Extract(archive, folder_ / kManifest);
  bool has_member = archive.Next();
  std::optional<std::string> signature;
  if (has_member && archive.name() == kSignature) {
    signature = ReadSignature(archive);
    has_member = archive.Next();
  }
  const std::string manifest = ReadFile(folder_ / kManifest, kMaxManifest);
  trusted.Check(manifest, signature);
  manifest_ = ParseManifest(manifest);
  CheckFreeSpace(manifest_, folder_);
  std::map<std::string, FileEntry> missing = manifest_.files;
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

Manifest VerifyBundle(const std::string& bundle, const std::optional<SignedRelease>& release) {
  return OpenBundle(bundle, release).manifest();
}

}  // namespace tvmflow

#include "archive.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "sha256.h"
#include "tvmflow/error.h"

#ifdef TVMFLOW_ZLIB
#include <zlib.h>
#endif

namespace tvmflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "bundle.json";
constexpr int64_t kManifestLimit = 1 << 20;
constexpr size_t kChunk = 1 << 20;

using File = std::unique_ptr<std::FILE, int (*)(std::FILE*)>;

File OpenFile(const fs::path& path, const char* mode) { return {std::fopen(path.c_str(), mode), &std::fclose}; }

std::string ReadManifest(const fs::path& folder, const std::string& source) {
  File file = OpenFile(folder / kManifest, "rb");
  if (!file) throw Error("'" + source + "' is not a bundle: it has no " + kManifest);
  std::string text(kManifestLimit + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get())) throw Error("bundle '" + source + "' cannot be read");
  if (text.size() > kManifestLimit) throw Error("'" + source + "' is not a bundle: its " + kManifest + " is too large");
  return text;
}

void VerifyFile(const fs::path& path, const FileEntry& entry, const std::string& source) {
  const std::string name = path.filename().string();
  File file = OpenFile(path, "rb");
  if (!file) throw Error("bundle '" + source + "' lacks " + name + "; fetch it again");
  std::vector<char> chunk(kChunk);
  Sha256 digest;
  int64_t size = 0;
  while (size_t count = std::fread(chunk.data(), 1, chunk.size(), file.get())) {
    digest.Update(chunk.data(), count);
    size += static_cast<int64_t>(count);
    if (size > entry.size) break;
  }
  if (size != entry.size || digest.Finish() != entry.sha256) {
    throw Error("bundle '" + source + "': " + name + " is not what its manifest says; fetch it again");
  }
}

#ifdef TVMFLOW_ZLIB

constexpr size_t kBlock = 512;
constexpr size_t kRecord = 10240;

// The tar stream of a bundle. Reads what tvmflow packs and no more.
class Archive {
 public:
  struct Header {
    std::string name;
    int64_t size;
  };

  explicit Archive(const std::string& bundle) : bundle_(bundle), stream_(gzopen(bundle.c_str(), "rb"), &gzclose_r) {
    if (!stream_) throw Error("bundle '" + bundle + "' cannot be read");
    // zlib passes on a file that is not compressed as it is.
    if (gzdirect(stream_.get())) Fail("it is not compressed");
  }

  [[noreturn]] void Fail(const std::string& reason) const {
    throw Error("'" + bundle_ + "' is not a bundle or is damaged (" + reason + "); fetch it again");
  }

  // Reads the header of the next member, false at the end.
  bool Next(Header& header) {
    char block[kBlock];
    Exactly(block, kBlock);
    if (AllZero(block, kBlock)) return false;
    unsigned sum = 0;
    for (size_t i = 0; i < kBlock; ++i) sum += i >= 148 && i < 156 ? ' ' : static_cast<unsigned char>(block[i]);
    if (Octal(block + 148, 8) != sum) Fail("a header's check sum is wrong");
    header.name.assign(block, strnlen(block, 100));
    if (block[156] != '0' || block[345] != '\0') Fail("'" + header.name + "' is not a regular file");
    header.size = Octal(block + 124, 12);
    return true;
  }

  void Content(const Header& header, const fs::path& path) {
    File file = OpenFile(path, "wbx");
    if (!file) throw Error("bundle '" + bundle_ + "' cannot be unpacked into '" + path.parent_path().string() + "'");
    std::vector<char> chunk(kChunk);
    for (int64_t left = header.size; left > 0;) {
      size_t count = static_cast<size_t>(std::min<int64_t>(left, kChunk));
      Exactly(chunk.data(), count);
      if (std::fwrite(chunk.data(), 1, count, file.get()) != count) NoSpace();
      left -= static_cast<int64_t>(count);
    }
    if (std::fclose(file.release()) != 0) NoSpace();
    Exactly(chunk.data(), static_cast<size_t>(-header.size & (kBlock - 1)));
  }

  // To the end, so that gzip's own check sum is compared; but no further than tar pads.
  void End() {
    std::vector<char> padding(kRecord + 1);
    int count = gzread(stream_.get(), padding.data(), static_cast<unsigned>(padding.size()));
    if (count < 0 || gzclose_r(stream_.release()) != Z_OK) Fail("it ends too early or its check sum is wrong");
    if (count > static_cast<int>(kRecord) || !AllZero(padding.data(), static_cast<size_t>(count))) {
      Fail("it goes on after its end");
    }
  }

 private:
  [[noreturn]] void NoSpace() const {
    throw Error("bundle '" + bundle_ + "' cannot be unpacked; free space, or set TMPDIR to another folder");
  }

  void Exactly(char* data, size_t size) {
    if (gzread(stream_.get(), data, static_cast<unsigned>(size)) != static_cast<int>(size)) {
      Fail("it ends too early or is not compressed by gzip");
    }
  }

  static bool AllZero(const char* data, size_t size) {
    for (size_t i = 0; i < size; ++i) {
      if (data[i] != 0) return false;
    }
    return true;
  }

  int64_t Octal(const char* field, size_t size) const {
    int64_t value = 0;
    size_t i = 0;
    for (; i < size && field[i] >= '0' && field[i] <= '7'; ++i) value = value * 8 + (field[i] - '0');
    if (i == 0 || (i < size && field[i] != '\0' && field[i] != ' ')) Fail("a header's number cannot be read");
    return value;
  }

  std::string bundle_;
  std::unique_ptr<gzFile_s, int (*)(gzFile)> stream_;
};

#endif

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  fs::path parent = fs::temp_directory_path(error);
  std::string pattern = ((error ? fs::path("/tmp") : parent) / "tvmflow-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) throw Error("no folder can be made as '" + pattern + "'; set TMPDIR");
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void Unpack(const std::string& bundle, const fs::path& folder) {
  std::error_code error;
  if (!fs::exists(bundle, error)) throw Error("there is no bundle '" + bundle + "'");
#ifdef TVMFLOW_ZLIB
  Archive archive(bundle);
  Archive::Header header;
  if (!archive.Next(header) || header.name != kManifest) {
    throw Error("'" + bundle + "' is not a bundle: it does not begin with " + kManifest);
  }
  if (header.size > kManifestLimit) throw Error("'" + bundle + "' is not a bundle: its " + kManifest + " is too large");
  archive.Content(header, folder / kManifest);
  std::map<std::string, FileEntry> left = ParseManifest(ReadManifest(folder, bundle), bundle).files;
  uintmax_t needed = 0, free = fs::space(folder, error).available;
  for (const auto& [name, entry] : left) {
    needed = static_cast<uintmax_t>(entry.size) > UINTMAX_MAX - needed ? UINTMAX_MAX : needed + entry.size;
  }
  if (!error && needed > free) {
    throw Error("bundle '" + bundle + "' needs " + std::to_string(needed >> 20) + " MiB in '" + folder.string() + "', " +
                std::to_string(free >> 20) + " MiB are free");
  }
  while (archive.Next(header)) {
    auto entry = left.find(header.name);
    if (entry == left.end() || entry->second.size != header.size) {
      throw Error("bundle '" + bundle + "' holds '" + header.name +
                  "', which its manifest does not describe; do not trust it");
    }
    left.erase(entry);
    archive.Content(header, folder / header.name);
  }
  archive.End();
  if (!left.empty()) throw Error("bundle '" + bundle + "' ends before '" + left.begin()->first + "'; fetch it again");
#else
  (void)folder;
  throw Error("this program is built without zlib; unpack '" + bundle +
              "' with `tar -xzf` into an empty folder and give that");
#endif
}

Manifest Verify(const fs::path& folder, const std::string& source) {
  Manifest manifest = ParseManifest(ReadManifest(folder, source), source);
  for (const auto& [name, entry] : manifest.files) VerifyFile(folder / name, entry, source);
  return manifest;
}

}  // namespace tvmflow

#include "archive.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "bytes.h"
#include "sha256.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

namespace fs = std::filesystem;

constexpr const char* kManifest = "bundle.json";
constexpr uint64_t kManifestLimit = 1 << 20;
constexpr size_t kChunk = 1 << 20;

// Calls `read`; its errors name the bundle then.
template <typename Read>
auto Naming(const std::string& bundle, const Read& read) {
  try {
    return read();
  } catch (const Unusable& error) {
    throw Error("bundle '" + bundle + "' cannot be used: " + error.what());
  } catch (const Error& error) {
    throw Error("'" + bundle + "' is not a bundle or is damaged (" + error.what() + "); fetch it again");
  }
}

std::string ReadManifest(const fs::path& folder, const std::string& bundle) {
  return Naming(bundle, [&] {
    if (!fs::exists(folder / kManifest)) throw Error(std::string("it has no ") + kManifest);
    InputFile file((folder / kManifest).string());
    if (file.size() > kManifestLimit) throw Error(std::string("its ") + kManifest + " is too large");
    std::string text(static_cast<size_t>(file.size()), '\0');
    file.Read(0, text.data(), text.size());
    return text;
  });
}

void CheckDigest(const fs::path& path, const FileEntry& entry) {
  InputFile file(path.string());
  bool same = file.size() == static_cast<uint64_t>(entry.size);
  if (same) {
    Stored source(file, 0, file.size());
    std::vector<char> chunk(kChunk);
    Sha256 digest;
    while (source.left() > 0) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(source.left(), kChunk));
      source.Read(chunk.data(), count);
      digest.Update(chunk.data(), count);
    }
    same = digest.Finish() == entry.sha256;
  }
  if (!same) throw Error("it is not what the manifest says");
}

#ifdef TVMFLOW_ZLIB

constexpr size_t kBlock = 512;
constexpr uint64_t kRecord = 10240;
// Bytes of a compressed one; DEFLATE can do more, but not at the level at which bundles are packed.
constexpr uint64_t kMostCompressed = 256;
constexpr uint64_t kSignatureLimit = 1 << 10;

struct Header {
  std::string name;
  uint64_t size;
};

// The block before a member as tvmflow packs it.
std::string HeaderBlock(const Header& header) {
  char size[12];
  std::snprintf(size, sizeof size, "%011llo", static_cast<unsigned long long>(header.size));
  std::string block = header.name;
  const auto add = [&](size_t at, const std::string& field) { block.resize(at, '\0'), block += field; };
  add(100, "0000644"), add(108, "0000000"), add(116, "0000000"), add(124, size), add(136, "00000000000");
  add(148, "        0");
  add(257, std::string("ustar\00000", 8));
  add(kBlock, "");
  unsigned sum = 0;
  for (char byte : block) sum += static_cast<unsigned char>(byte);
  char digits[8];
  std::snprintf(digits, sizeof digits, "%06o", sum);
  return block.replace(148, 7, digits, 7);
}

// The members of a bundle. Takes what tvmflow packs and nothing else.
class Archive {
 public:
  explicit Archive(const std::string& bundle) : file_(bundle), tail_(8) {
    static constexpr char kGzip[] = "\x1f\x8b\x08\0\0\0\0\0\x04\xff";
    constexpr uint64_t kHead = sizeof kGzip - 1;
    char head[kHead];
    if (file_.size() < kHead + tail_.size()) throw Error("it ends too early");
    file_.Read(0, head, kHead);
    if (std::memcmp(head, kGzip, kHead) != 0) throw Error("it does not begin as one");
    file_.Read(file_.size() - tail_.size(), tail_.data(), tail_.size());
    stream_ = std::make_unique<Deflated>(file_, kHead, file_.size() - kHead - tail_.size(),
                                         file_.size() * kMostCompressed);
  }

  // Reads the header of the next member, false at the end.
  bool Next(Header& header) {
    std::string block(kBlock, '\0');
    Read(block.data(), kBlock);
    if (block == std::string(kBlock, '\0')) return false;
    header.name.assign(block, 0, std::min<size_t>(block.find('\0'), 100));
    header.size = 0;
    for (size_t i = 124; i < 135; ++i) header.size = header.size * 8 + static_cast<uint64_t>((block[i] - '0') & 7);
    if (block != HeaderBlock(header)) throw Error("something in it is not as tvmflow packs it");
    return true;
  }

  // Writes the member whose header was read to a file.
  void Extract(const Header& header, const fs::path& path) {
    OutputFile file(path.string());
    Content(header, [&](const char* data, size_t size) { file.Write(data, size); });
    file.Close();
  }

  void Skip(const Header& header) {
    Content(header, [](const char*, size_t) {});
  }

  // Holds that nothing follows the last member but what fills tar's record, and that gzip's check sum is right.
  void End() {
    const uint64_t rest = (kRecord - (size_ + kBlock) % kRecord) % kRecord + kBlock;
    std::vector<char> padding(static_cast<size_t>(rest));
    Read(padding.data(), padding.size());
    if (!AllZero(padding) || !stream_->Ended()) throw Error("it goes on after its end");
    if (Little<uint32_t>(tail_.data()) != crc_.value() ||
        Little<uint32_t>(tail_.data() + 4) != static_cast<uint32_t>(size_)) {
      throw Error("its check sum is wrong");
    }
  }

 private:
  template <typename Take>
  void Content(const Header& header, const Take& take) {
    std::vector<char> chunk(kChunk);
    for (uint64_t left = header.size; left > 0;) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(left, kChunk));
      Read(chunk.data(), count);
      take(chunk.data(), count);
      left -= count;
    }
    std::vector<char> padding((kBlock - header.size % kBlock) % kBlock);
    Read(padding.data(), padding.size());
    if (!AllZero(padding)) throw Error("something stands between its files");
  }

  void Read(char* data, size_t size) {
    stream_->Read(data, size);
    crc_.Update(data, size);
    size_ += size;
  }

  static bool AllZero(const std::vector<char>& bytes) {
    return std::all_of(bytes.begin(), bytes.end(), [](char byte) { return byte == 0; });
  }

  InputFile file_;
  std::vector<uint8_t> tail_;
  std::unique_ptr<Deflated> stream_;
  Crc32 crc_;
  uint64_t size_ = 0;
};

void CheckSpace(const Manifest& manifest, const fs::path& folder) {
  std::error_code error;
  const uintmax_t free = fs::space(folder, error).available;
  uintmax_t needed = 0;
  for (const auto& [name, entry] : manifest.files) {
    const uintmax_t size = static_cast<uintmax_t>(entry.size);
    needed = size > UINTMAX_MAX - needed ? UINTMAX_MAX : needed + size;
  }
  if (error || needed <= free) return;
  throw Unusable("it needs " + std::to_string(needed >> 20) + " MiB in '" + folder.string() + "', " +
                 std::to_string(free >> 20) + " MiB are free");
}

#endif

}  // namespace

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  const fs::path parent = fs::temp_directory_path(error);
  std::string pattern = ((error ? fs::path("/tmp") : parent) / "tvmflow-XXXXXX").string();
  if (mkdtemp(pattern.data()) == nullptr) {
    throw Error("no folder can be made in '" + parent.string() + "'; set TMPDIR to another one");
  }
  path_ = pattern;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void Unpack(const std::string& bundle, const fs::path& folder) {
#ifdef TVMFLOW_ZLIB
  Naming(bundle, [&] {
    Archive archive(bundle);
    Header header;
    if (!archive.Next(header) || header.name != kManifest) {
      throw Error(std::string("it does not begin with ") + kManifest);
    }
    if (header.size > kManifestLimit) throw Error(std::string("its ") + kManifest + " is too large");
    archive.Extract(header, folder / kManifest);
    const Manifest manifest = ParseManifest(ReadManifest(folder, bundle));
    CheckSpace(manifest, folder);
    std::map<std::string, FileEntry> left = manifest.files;
    bool more = archive.Next(header);
    if (more && header.name == "bundle.sig") {
      if (header.size > kSignatureLimit) throw Error("its signature is too large");
      archive.Skip(header);
      more = archive.Next(header);
    }
    for (; more; more = archive.Next(header)) {
      const auto entry = left.find(header.name);
      if (entry == left.end() || static_cast<uint64_t>(entry->second.size) != header.size) {
        throw Error("its manifest does not describe its file '" + header.name + "'");
      }
      left.erase(entry);
      archive.Extract(header, folder / header.name);
    }
    archive.End();
    left.erase("mod.params");  // may lie beside the bundle
    if (!left.empty()) throw Error("it lacks " + left.begin()->first);
  });
#else
  (void)folder;
  throw Error("this program is built without zlib; unpack '" + bundle +
              "' with `tar -xzf` into an empty folder and give that");
#endif
}

fs::path WeightsPath(const Manifest& manifest, const fs::path& folder, const std::string& bundle) {
  const fs::path inside = folder / "mod.params";
  std::error_code ignored;
  if (fs::exists(inside, ignored)) return inside;
  return fs::absolute(bundle).lexically_normal().parent_path() / manifest.files.at("mod.params").sha256;
}

Manifest Verify(const fs::path& folder, const std::string& bundle) {
  Manifest manifest = Naming(bundle, [&] { return ParseManifest(ReadManifest(folder, bundle)); });
  for (const auto& [name, entry] : manifest.files) {
    const fs::path path = name == "mod.params" ? WeightsPath(manifest, folder, bundle) : folder / name;
    try {
      CheckDigest(path, entry);
    } catch (const Error& error) {
      const std::string place = path.parent_path() == folder ? name : path.string();
      throw Error("bundle '" + bundle + "': " + place + " cannot be used (" + error.what() + "); fetch it again");
    }
  }
  return manifest;
}

}  // namespace tvmflow

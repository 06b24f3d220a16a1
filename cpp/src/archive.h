// Reading the archive of a bundle.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

struct archive;

namespace tvmflow {

class TarBlocks;

// The members of a `.tar.gz` bundle in order. zlib decompresses the archive and libarchive reads it. Every header must
// also be, byte for byte, the one with which tvmflow packs a regular file of that name and size, so that links, devices,
// folders, sparse files and extended headers are refused. Methods throw Error for anything else and for a damaged file.
class BundleArchive {
 public:
  using Sink = std::function<void(const void* data, size_t size)>;

  explicit BundleArchive(const std::string& path);
  ~BundleArchive();

  // Moves to the next member, whose content before it must have been read. Returns whether there is one; after the
  // last one it checks that nothing follows.
  bool Next();
  // The name and the size in bytes of the current member.
  const std::string& name() const { return name_; }
  uint64_t size() const { return size_; }
  // Passes the content of the current member to `sink` in pieces.
  void Read(const Sink& sink);

 private:
  void CheckStatus(int status);
  void CheckEnd();

  std::unique_ptr<TarBlocks> blocks_;
  std::unique_ptr<archive, int (*)(archive*)> archive_;
  std::string name_;
  uint64_t size_ = 0;
  // The number of bytes of the uncompressed archive up to the end of the current member.
  uint64_t members_end_ = 0;
};

}  // namespace tvmflow

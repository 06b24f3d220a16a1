// Reading files and compressed parts of files with every size checked, and writing files.
#pragma once

#include <zlib.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

namespace tvmflow {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers in files are copied to memory as they are");

// The number in little-endian order at `bytes`.
template <typename T>
T Little(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The CRC-32 of gzip and zip.
class Crc32 {
 public:
  void Update(const void* data, size_t size) {
    value_ = static_cast<uint32_t>(crc32_z(value_, static_cast<const Bytef*>(data), size));
  }
  uint32_t value() const { return value_; }

 private:
  uint32_t value_ = 0;
};

// A regular file, open for reading. Its errors do not name the file.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  uint64_t size() const { return size_; }
  // Reads exactly `size` bytes. Throws Error if the file has fewer from `offset` on.
  void Read(uint64_t offset, void* data, size_t size);

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  uint64_t size_ = 0;
};

// A sequence of a fixed number of bytes.
class Source {
 public:
  virtual ~Source() = default;
  // Reads exactly `size` bytes. Throws Error if there are fewer.
  virtual void Read(void* data, size_t size) = 0;
  uint64_t remaining() const { return remaining_; }

 protected:
  explicit Source(uint64_t size) : remaining_(size) {}
  uint64_t remaining_;
};

// A section of a file.
class FileSection : public Source {
 public:
  FileSection(InputFile& file, uint64_t offset, uint64_t size) : Source(size), file_(file), offset_(offset) {}
  void Read(void* data, size_t size) override;

 private:
  InputFile& file_;
  uint64_t offset_;
};

// Decompresses a section of a file: one DEFLATE stream, bare or in gzip's frame, whose check sum zlib verifies.
class Inflater {
 public:
  enum class Frame { kNone, kGzip };
  Inflater(FileSection section, Frame frame);
  ~Inflater();
  Inflater(const Inflater&) = delete;
  Inflater& operator=(const Inflater&) = delete;

  // Reads up to `size` bytes and returns their number, which is smaller only at the end of the stream. Throws Error for
  // a damaged or truncated stream.
  size_t Read(void* data, size_t size);
  // Whether the stream has ended exactly where its section ends.
  bool IsComplete() const { return has_ended_ && stream_.avail_in == 0 && section_.remaining() == 0; }

 private:
  FileSection section_;
  std::vector<uint8_t> buffer_;
  z_stream stream_{};
  bool has_ended_ = false;
};

// A compressed section of a file, as a zip archive holds it.
class DeflatedSection : public Source {
 public:
  // `size` is the number of bytes before they were compressed.
  DeflatedSection(FileSection section, uint64_t size) : Source(size), inflater_(section, Inflater::Frame::kNone) {}
  void Read(void* data, size_t size) override;

 private:
  Inflater inflater_;
};

// A new file, or an old one overwritten from its start.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  void Write(const void* data, size_t size);
  void Write(const std::string& bytes) { Write(bytes.data(), bytes.size()); }
  void Close();

 private:
  [[noreturn]] void Fail() const;
  std::string path_;
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
};

}  // namespace tvmflow

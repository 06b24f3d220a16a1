// Reading files as they lie there and inflated, with every size checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#ifdef TVMFLOW_ZLIB
#include <zlib.h>
#endif

namespace tvmflow {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "numbers of files are read and written as they lie in memory");

template <typename T>
T Little(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The CRC-32 of gzip and zip.
class Crc32 {
 public:
  void Update(const void* data, size_t size);
  uint32_t value() const { return ~state_; }

 private:
  uint32_t state_ = 0xFFFFFFFF;
};

// An open regular file. Its errors do not name it.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  uint64_t size() const { return size_; }
  void Read(uint64_t offset, void* data, size_t size);

 private:
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file_;
  uint64_t size_ = 0;
};

// Bytes to be read in order, at most so many.
class Source {
 public:
  virtual ~Source() = default;
  // Reads exactly so many bytes. Throws Error if there are fewer.
  virtual void Read(void* data, size_t size) = 0;
  uint64_t left() const { return left_; }

 protected:
  explicit Source(uint64_t left) : left_(left) {}
  uint64_t left_;
};

// A part of a file as it is.
class Stored : public Source {
 public:
  Stored(InputFile& file, uint64_t offset, uint64_t size) : Source(size), file_(file), at_(offset) {}
  void Read(void* data, size_t size) override;

 private:
  InputFile& file_;
  uint64_t at_;
};

#ifdef TVMFLOW_ZLIB

// A part of a file that is one stream of DEFLATE; what it holds has at most `limit` bytes.
class Deflated : public Source {
 public:
  Deflated(InputFile& file, uint64_t offset, uint64_t compressed, uint64_t limit);
  ~Deflated() override;
  void Read(void* data, size_t size) override;
  // Whether nothing is left, neither in the stream nor in the part of the file after it.
  bool Ended();

 private:
  // Inflates up to `size` bytes and returns how many those are: fewer only at the stream's end.
  size_t Inflate(void* data, size_t size);

  Stored input_;
  std::vector<uint8_t> buffer_;
  z_stream stream_{};
  bool ended_ = false;
};

#endif

// A file that is written from its start.
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

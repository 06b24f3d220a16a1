#include "bytes.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>

#include "tvmflow/error.h"

namespace tvmflow {
namespace {

std::array<uint32_t, 256> CrcTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? 0xEDB88320 : 0);
    table[i] = value;
  }
  return table;
}

}  // namespace

void Crc32::Update(const void* data, size_t size) {
  static const std::array<uint32_t, 256> table = CrcTable();
  const auto* bytes = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < size; ++i) state_ = table[(state_ ^ bytes[i]) & 0xFF] ^ (state_ >> 8);
}

InputFile::InputFile(const std::string& path) : file_(nullptr, &std::fclose) {
  struct stat status{};
  // Asked before it is opened: to open a pipe would wait for its writer.
  if (stat(path.c_str(), &status) != 0) throw Error("there is no such file");
  if (!S_ISREG(status.st_mode)) throw Error("it is no regular file");
  file_.reset(std::fopen(path.c_str(), "rb"));
  if (!file_) throw Error("it cannot be opened");
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::Read(uint64_t offset, void* data, size_t size) {
  if (offset > size_ || size > size_ - offset) throw Error("it ends too early");
  // To seek throws away what was read ahead.
  if (static_cast<off_t>(offset) != ftello(file_.get()) && fseeko(file_.get(), static_cast<off_t>(offset), SEEK_SET)) {
    throw Error("it cannot be read");
  }
  if (size > 0 && std::fread(data, 1, size, file_.get()) != size) throw Error("it cannot be read");
}

void Stored::Read(void* data, size_t size) {
  if (size > left_) throw Error("it ends too early");
  file_.Read(at_, data, size);
  at_ += size, left_ -= size;
}

#ifdef TVMFLOW_ZLIB

Deflated::Deflated(InputFile& file, uint64_t offset, uint64_t compressed, uint64_t limit)
    : Source(limit), input_(file, offset, compressed), buffer_(1 << 16) {
  if (inflateInit2(&stream_, -MAX_WBITS) != Z_OK) throw Error("there is no memory to inflate it");
}

Deflated::~Deflated() { inflateEnd(&stream_); }

size_t Deflated::Inflate(void* data, size_t size) {
  auto* out = static_cast<Bytef*>(data);
  size_t done = 0;
  while (done < size && !ended_) {
    if (stream_.avail_in == 0) {
      const size_t count = static_cast<size_t>(std::min<uint64_t>(input_.left(), buffer_.size()));
      input_.Read(buffer_.data(), count);
      stream_.next_in = buffer_.data();
      stream_.avail_in = static_cast<uInt>(count);
    }
    const uInt wanted = static_cast<uInt>(std::min<size_t>(size - done, 1 << 30));
    stream_.next_out = out + done;
    stream_.avail_out = wanted;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    done += wanted - stream_.avail_out;
    if (status == Z_BUF_ERROR) throw Error("it ends too early");
    if (status != Z_OK && status != Z_STREAM_END) throw Error("it cannot be inflated");
    ended_ = status == Z_STREAM_END;
  }
  return done;
}

void Deflated::Read(void* data, size_t size) {
  if (size > left_) throw Error("it holds more than it may");
  if (Inflate(data, size) != size) throw Error("it ends too early");
  left_ -= size;
}

bool Deflated::Ended() {
  char more;
  return Inflate(&more, 1) == 0 && stream_.avail_in == 0 && input_.left() == 0;
}

#endif

OutputFile::OutputFile(const std::string& path) : path_(path), file_(std::fopen(path.c_str(), "wb"), &std::fclose) {
  if (!file_) Fail();
}

void OutputFile::Write(const void* data, size_t size) {
  if (size > 0 && std::fwrite(data, 1, size, file_.get()) != size) Fail();
}

void OutputFile::Close() {
  if (std::fclose(file_.release()) != 0) Fail();
}

void OutputFile::Fail() const {
  throw Unusable("'" + path_ + "' cannot be written; free space or choose another place");
}

}  // namespace tvmflow

#include "bytes.h"

#include <sys/stat.h>

#include <algorithm>

#include "tvmflow/error.h"

namespace tvmflow {

InputFile::InputFile(const std::string& path) : file_(nullptr, &std::fclose) {
  struct stat status{};
  // Before the file is opened: opening a named pipe would wait for its writer.
  if (stat(path.c_str(), &status) != 0) throw Error("there is no such file");
  if (!S_ISREG(status.st_mode)) throw Error("it is no regular file");
  file_.reset(std::fopen(path.c_str(), "rb"));
  if (!file_) throw Error("it cannot be opened");
  size_ = static_cast<uint64_t>(status.st_size);
}

void InputFile::Read(uint64_t offset, void* data, size_t size) {
  if (offset > size_ || size > size_ - offset) throw Error("it ends too early");
  // A seek discards the read-ahead buffer.
  if (static_cast<off_t>(offset) != ftello(file_.get()) && fseeko(file_.get(), static_cast<off_t>(offset), SEEK_SET)) {
    throw Error("it cannot be read");
  }
  if (size > 0 && std::fread(data, 1, size, file_.get()) != size) throw Error("it cannot be read");
}

void FileSection::Read(void* data, size_t size) {
  if (size > remaining_) throw Error("it ends too early");
  file_.Read(offset_, data, size);
  offset_ += size, remaining_ -= size;
}

Inflater::Inflater(FileSection section, Frame frame) : section_(section), buffer_(1 << 16) {
  const int window = frame == Frame::kGzip ? MAX_WBITS + 16 : -MAX_WBITS;
  if (inflateInit2(&stream_, window) != Z_OK) throw Error("there is no memory to decompress it");
}

Inflater::~Inflater() { inflateEnd(&stream_); }

size_t Inflater::Read(void* data, size_t size) {
  auto* out = static_cast<Bytef*>(data);
  size_t count = 0;
  while (count < size && !has_ended_) {
    if (stream_.avail_in == 0) {
      const size_t input = static_cast<size_t>(std::min<uint64_t>(section_.remaining(), buffer_.size()));
      section_.Read(buffer_.data(), input);
      stream_.next_in = buffer_.data();
      stream_.avail_in = static_cast<uInt>(input);
    }
    const uInt room = static_cast<uInt>(std::min<size_t>(size - count, 1 << 30));
    stream_.next_out = out + count;
    stream_.avail_out = room;
    const int status = inflate(&stream_, Z_NO_FLUSH);
    count += room - stream_.avail_out;
    if (status == Z_BUF_ERROR) throw Error("it ends too early");
    if (status != Z_OK && status != Z_STREAM_END) throw Error("it cannot be decompressed");
    has_ended_ = status == Z_STREAM_END;
  }
  return count;
}

void DeflatedSection::Read(void* data, size_t size) {
  if (size > remaining_ || inflater_.Read(data, size) != size) throw Error("it ends too early");
  remaining_ -= size;
}

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

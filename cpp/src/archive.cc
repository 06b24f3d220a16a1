#include "archive.h"

#include <archive.h>
#include <archive_entry.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <vector>

#include "bytes.h"
#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

constexpr size_t kBlock = 512;
constexpr uint64_t kRecord = 10240;
// The largest ratio of an archive's size to its compressed size. DEFLATE reaches 1032, the level at which tvmflow packs
// bundles never 240.
constexpr uint64_t kMaxRatio = 256;
// The largest size that the digits of a header can express.
constexpr uint64_t kMaxMember = (uint64_t{8} << 30) - 1;
// A gzip header without a name and a time, written at the fastest level.
constexpr char kGzipHeader[] = {'\x1f', '\x8b', '\x08', 0, 0, 0, 0, 0, '\x04', '\xff'};

uint64_t RoundUp(uint64_t size, uint64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

bool IsZero(const uint8_t* begin, const uint8_t* end) {
  return std::all_of(begin, end, [](uint8_t byte) { return byte == 0; });
}

// The header with which tvmflow packs a file: format ustar, mode 644, no owner, no time.
std::string PackedHeader(const std::string& name, uint64_t size) {
  char size_digits[12];
  std::snprintf(size_digits, sizeof size_digits, "%011llo", static_cast<unsigned long long>(size));
  std::string header(kBlock, '\0');
  const auto put = [&header](size_t offset, const std::string& field) {
    header.replace(offset, field.size(), field);
  };
  put(0, name.substr(0, 100));
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, size_digits);
  put(136, "00000000000");
  put(148, "        0");  // the check sum, counted as spaces, and the type of a regular file
  put(257, std::string("ustar\00000", 8));
  unsigned sum = 0;
  for (char byte : header) sum += static_cast<unsigned char>(byte);
  char sum_digits[8];
  std::snprintf(sum_digits, sizeof sum_digits, "%06o", sum);
  put(148, std::string(sum_digits, 7));
  return header;
}

}  // namespace

// The blocks of a compressed tar archive. libarchive is given one block at a time and asks for the next only when it
// needs it, so `current` is a member's header after that was read, and its last block after its content was.
class TarBlocks {
 public:
  explicit TarBlocks(const std::string& path)
      : file_(path), limit_(file_.size() * kMaxRatio), inflater_(Section(file_), Inflater::Frame::kGzip) {
    char header[sizeof kGzipHeader];
    file_.Read(0, header, sizeof header);
    if (std::memcmp(header, kGzipHeader, sizeof header) != 0) throw Error("it does not begin as a bundle does");
  }

  // The next block; null after the last. It is valid until the next call.
  const uint8_t* Next() {
    offset_ += kBlock;
    if (offset_ >= filled_) Fill();
    if (filled_ == 0) return nullptr;
    size_ += kBlock;
    return current();
  }

  const uint8_t* current() const { return buffer_.data() + offset_; }
  // The number of bytes so far.
  uint64_t size() const { return size_; }
  // Whether the compressed stream ends where the file ends.
  bool IsComplete() const { return inflater_.IsComplete(); }

  // What libarchive calls. An exception must not pass through C code: it waits in `failure`.
  static la_ssize_t Read(struct archive*, void* self, const void** buffer) {
    auto* blocks = static_cast<TarBlocks*>(self);
    try {
      *buffer = blocks->Next();
      return *buffer == nullptr ? 0 : static_cast<la_ssize_t>(kBlock);
    } catch (...) {
      blocks->failure = std::current_exception();
      return ARCHIVE_FATAL;
    }
  }

  std::exception_ptr failure;

 private:
  static FileSection Section(InputFile& file) { return FileSection(file, 0, file.size()); }

  void Fill() {
    filled_ = inflater_.Read(buffer_.data(), buffer_.size());
    offset_ = 0;
    if (filled_ % kBlock != 0) throw Error("it ends too early");
    if (filled_ > limit_ - size_) throw Error("it unpacks to more than any bundle of its size");
  }

  InputFile file_;
  uint64_t limit_;
  Inflater inflater_;
  std::vector<uint8_t> buffer_ = std::vector<uint8_t>(128 * kBlock);
  size_t offset_ = 0;
  size_t filled_ = 0;
  uint64_t size_ = 0;
};

BundleArchive::BundleArchive(const std::string& path)
    : blocks_(std::make_unique<TarBlocks>(path)), archive_(archive_read_new(), &archive_read_free) {
  if (!archive_) throw Error("there is no memory to read it");
  // Every filter and format that is not enabled here is left out of a static program.
  CheckStatus(archive_read_support_format_tar(archive_.get()));
  CheckStatus(archive_read_open(archive_.get(), blocks_.get(), nullptr, &TarBlocks::Read, nullptr));
}

BundleArchive::~BundleArchive() = default;

bool BundleArchive::Next() {
  archive_entry* entry = nullptr;
  const int status = archive_read_next_header(archive_.get(), &entry);
  if (status == ARCHIVE_EOF) {
    CheckEnd();
    return false;
  }
  CheckStatus(status);
  const char* name = archive_entry_pathname(entry);
  const la_int64_t size = archive_entry_size(entry);
  if (name == nullptr || size < 0 || static_cast<uint64_t>(size) > kMaxMember) {
    throw Error("a file in it has no name or no size");
  }
  name_ = name;
  size_ = static_cast<uint64_t>(size);
  if (std::memcmp(blocks_->current(), PackedHeader(name_, size_).data(), kBlock) != 0) {
    throw Error("'" + Escape(name_) + "' in it is not packed as tvmflow packs a file");
  }
  members_end_ += kBlock + RoundUp(size_, kBlock);
  return true;
}

void BundleArchive::Read(const Sink& sink) {
  uint64_t count = 0;
  const void* data = nullptr;
  size_t piece = 0;
  la_int64_t offset = 0;
  int status;
  while ((status = archive_read_data_block(archive_.get(), &data, &piece, &offset)) != ARCHIVE_EOF) {
    CheckStatus(status);
    if (static_cast<uint64_t>(offset) != count || piece > size_ - count) throw Error("it holds a sparse file");
    sink(data, piece);
    count += piece;
  }
  if (count != size_) throw Error("it ends too early");
  const size_t rest = size_ % kBlock;
  if (rest != 0 && !IsZero(blocks_->current() + rest, blocks_->current() + kBlock)) {
    throw Error("it holds bytes between its files");
  }
}

void BundleArchive::CheckStatus(int status) {
  if (blocks_->failure) std::rethrow_exception(blocks_->failure);
  if (status != ARCHIVE_OK) throw Error("its archive is damaged");
}

// Two blocks of zeros end an archive, and more of them fill its last record.
void BundleArchive::CheckEnd() {
  if (blocks_->failure) std::rethrow_exception(blocks_->failure);
  // libarchive has checked the first block of zeros, and this function checks those from the second on.
  bool is_zero = IsZero(blocks_->current(), blocks_->current() + kBlock);
  while (const uint8_t* block = blocks_->Next()) is_zero = is_zero && IsZero(block, block + kBlock);
  if (!is_zero || blocks_->size() != RoundUp(members_end_ + 2 * kBlock, kRecord) || !blocks_->IsComplete()) {
    throw Error("it does not end after its last file");
  }
}

}  // namespace tvmflow

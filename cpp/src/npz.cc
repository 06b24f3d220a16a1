#include "tvmflow/npz.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string_view>

#include "bytes.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

constexpr size_t kArrayAlignment = 64;  // TVM's kAllocAlignment
constexpr size_t kHeaderLimit = 1 << 16;
constexpr int kMostDimensions = 32;

struct DtypeEntry {
  const char* name;
  const char* npy;
  DLDataType dtype;
};
constexpr DtypeEntry kDtypes[] = {
    {"float16", "<f2", {kDLFloat, 16, 1}}, {"float32", "<f4", {kDLFloat, 32, 1}}, {"float64", "<f8", {kDLFloat, 64, 1}},
    {"int8", "|i1", {kDLInt, 8, 1}},       {"int16", "<i2", {kDLInt, 16, 1}},     {"int32", "<i4", {kDLInt, 32, 1}},
    {"int64", "<i8", {kDLInt, 64, 1}},     {"uint8", "|u1", {kDLUInt, 8, 1}},     {"uint16", "<u2", {kDLUInt, 16, 1}},
    {"uint32", "<u4", {kDLUInt, 32, 1}},   {"uint64", "<u8", {kDLUInt, 64, 1}},   {"bool", "|b1", {kDLBool, 8, 1}},
};

const DtypeEntry& EntryOf(DLDataType dtype) {
  for (const DtypeEntry& entry : kDtypes) {
    if (entry.dtype.code == dtype.code && entry.dtype.bits == dtype.bits && entry.dtype.lanes == dtype.lanes) {
      return entry;
    }
  }
  throw Error("NumPy has no dtype of kind " + std::to_string(dtype.code) + " with " + std::to_string(dtype.bits) +
              " bits");
}

struct AllocateAligned {
  void AllocData(DLTensor* tensor) {
    size_t size = std::max<size_t>(tvm::ffi::GetDataSize(*tensor), 1);
    tensor->data = std::aligned_alloc(kArrayAlignment, (size + kArrayAlignment - 1) / kArrayAlignment * kArrayAlignment);
    if (tensor->data == nullptr) throw Error("there is no memory for an array of " + std::to_string(size) + " bytes");
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

// The header of an array: a Python dictionary with the three keys that NumPy writes.
class Header {
 public:
  explicit Header(std::string_view text) : text_(text) {
    std::set<std::string> keys;
    Expect('{');
    while (!Accept('}')) {
      const std::string key = String();
      Expect(':');
      if (!keys.insert(key).second) Fail();
      if (key == "descr") {
        descr = String();
      } else if (key == "fortran_order") {
        fortran = Boolean();
      } else if (key == "shape") {
        Shape();
      } else {
        Fail();
      }
      if (!Accept(',') && Peek() != '}') Fail();
    }
    if (keys.size() != 3 || Peek() != '\0') Fail();
  }

  std::string descr;
  bool fortran = false;
  std::vector<int64_t> shape;

 private:
  [[noreturn]] static void Fail() { throw Error("its header is not one of NumPy's for an array of numbers"); }
  // The next character that is no space; 0 at the end.
  char Peek() {
    while (position_ < text_.size() && (text_[position_] == ' ' || text_[position_] == '\n')) ++position_;
    return position_ < text_.size() ? text_[position_] : '\0';
  }
  // Consumes `character` if it comes next, and returns whether it did.
  bool Accept(char character) {
    if (Peek() != character) return false;
    ++position_;
    return true;
  }
  void Expect(char character) {
    if (!Accept(character)) Fail();
  }
  std::string String() {
    const char quote = Peek();
    if (quote != '\'' && quote != '"') Fail();
    const size_t end = text_.find(quote, position_ + 1);
    if (end == std::string_view::npos) Fail();
    std::string result(text_.substr(position_ + 1, end - position_ - 1));
    position_ = end + 1;
    return result;
  }
  bool Boolean() {
    Peek();
    for (auto [word, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (text_.substr(position_, word.size()) == word) {
        position_ += word.size();
        return value;
      }
    }
    Fail();
  }
  void Shape() {
    Expect('(');
    while (!Accept(')')) {
      int64_t size = 0;
      if (Peek() < '0' || Peek() > '9') Fail();
      for (; position_ < text_.size() && text_[position_] >= '0' && text_[position_] <= '9'; ++position_) {
        if (size > std::numeric_limits<int64_t>::max() / 16) Fail();
        size = size * 10 + (text_[position_] - '0');
      }
      shape.push_back(size);
      if (shape.size() > kMostDimensions) Fail();
      if (!Accept(',') && Peek() != ')') Fail();
    }
  }

  std::string_view text_;
  size_t position_ = 0;
};

// Reads the one array that fills the source.
Tensor ReadArray(Source& source, Crc32& crc) {
  const auto read = [&](void* data, size_t size) {
    source.Read(data, size);
    crc.Update(data, size);
  };
  uint8_t prefix[12];
  if (source.remaining() < 10) throw Error("it is no array of NumPy");
  read(prefix, 8);
  if (std::memcmp(prefix, "\x93NUMPY", 6) != 0 || prefix[6] < 1 || prefix[6] > 3) {
    throw Error("it is no array of NumPy");
  }
  const size_t width = prefix[6] == 1 ? 2 : 4;
  read(prefix + 8, width);
  const size_t length = width == 2 ? Little<uint16_t>(prefix + 8) : Little<uint32_t>(prefix + 8);
  if (length > kHeaderLimit) throw Error("its header is too long");
  std::string text(length, '\0');
  read(text.data(), length);
  const Header header(text);
  const DtypeEntry* entry = nullptr;
  for (const DtypeEntry& item : kDtypes) {
    if (header.descr == item.npy) entry = &item;
  }
  if (entry == nullptr) throw Error("its dtype '" + header.descr + "' is not one of numbers in native byte order");
  if (header.fortran) throw Error("it is in Fortran's order; save numpy.ascontiguousarray of it");
  // A product in floating point cannot overflow, and one as small as a file's size is exact.
  double bytes = entry->dtype.bits / 8, stride = bytes;
  for (int64_t size : header.shape) {
    bytes *= static_cast<double>(size);
    stride *= static_cast<double>(std::max<int64_t>(size, 1));
  }
  // Without elements, too, the distances between them must be numbers of 64 bits.
  if (bytes != static_cast<double>(source.remaining()) || stride >= 0x1p63) {
    throw Error("its size is not that of its shape and dtype");
  }
  Tensor tensor = Allocate(header.shape, entry->dtype);
  read(tensor.data_ptr(), static_cast<size_t>(source.remaining()));
  return tensor;
}

// One member of a zip archive.
struct Member {
  std::string name;
  uint16_t method;
  uint32_t crc;
  uint64_t compressed, size, header;
};

// Reads the central directory of an archive, with the format's 64-bit fields where they are used.
std::vector<Member> ReadDirectory(InputFile& file) {
  constexpr size_t kEnd = 22, kLocator = 20, kEnd64 = 56, kEntry = 46;
  const size_t span = static_cast<size_t>(std::min<uint64_t>(file.size(), kEnd + 0xFFFF));
  if (span < kEnd) throw Error("it is no zip archive");
  std::vector<uint8_t> tail(span);
  file.Read(file.size() - span, tail.data(), span);
  size_t position = span - kEnd;
  while (Little<uint32_t>(&tail[position]) != 0x06054b50) {
    if (position-- == 0) throw Error("it is no zip archive or ends too early");
  }
  uint64_t count = Little<uint16_t>(&tail[position + 10]), size = Little<uint32_t>(&tail[position + 12]);
  uint64_t offset = Little<uint32_t>(&tail[position + 16]);
  const uint64_t end = file.size() - span + position;
  if ((count == 0xFFFF || size == 0xFFFFFFFF || offset == 0xFFFFFFFF) && end >= kLocator) {
    uint8_t locator[kLocator], end64[kEnd64];
    file.Read(end - kLocator, locator, kLocator);
    if (Little<uint32_t>(locator) == 0x07064b50) {
      file.Read(Little<uint64_t>(locator + 8), end64, kEnd64);
      if (Little<uint32_t>(end64) != 0x06064b50) throw Error("its directory is damaged");
      count = Little<uint64_t>(end64 + 32), size = Little<uint64_t>(end64 + 40), offset = Little<uint64_t>(end64 + 48);
    }
  }
  if (offset > file.size() || size > file.size() - offset || count > size / kEntry) {
    throw Error("its directory is damaged");
  }
  std::vector<uint8_t> directory(static_cast<size_t>(size));
  file.Read(offset, directory.data(), directory.size());
  std::vector<Member> members;
  size_t next = 0;
  for (uint64_t i = 0; i < count; ++i) {
    const uint8_t* entry = directory.data() + next;
    if (directory.size() - next < kEntry || Little<uint32_t>(entry) != 0x02014b50) {
      throw Error("its directory is damaged");
    }
    const size_t name = Little<uint16_t>(entry + 28), extra = Little<uint16_t>(entry + 30);
    const size_t length = kEntry + name + extra + Little<uint16_t>(entry + 32);
    if (directory.size() - next < length) throw Error("its directory is damaged");
    if (Little<uint16_t>(entry + 8) & 1) throw Error("it is encrypted");
    Member member{std::string(reinterpret_cast<const char*>(entry) + kEntry, name),
                  Little<uint16_t>(entry + 10),
                  Little<uint32_t>(entry + 16),
                  Little<uint32_t>(entry + 20),
                  Little<uint32_t>(entry + 24),
                  Little<uint32_t>(entry + 42)};
    for (size_t field = kEntry + name; field + 4 <= kEntry + name + extra;) {
      const size_t stop = field + 4 + Little<uint16_t>(entry + field + 2);
      if (stop > kEntry + name + extra) throw Error("its directory is damaged");
      if (Little<uint16_t>(entry + field) == 1) {
        size_t value = field + 4;
        for (uint64_t* wide : {&member.size, &member.compressed, &member.header}) {
          if (*wide == 0xFFFFFFFF && value + 8 <= stop) {
            *wide = Little<uint64_t>(entry + value);
            value += 8;
          }
        }
      }
      field = stop;
    }
    members.push_back(std::move(member));
    next += length;
  }
  return members;
}

Tensor ReadMember(InputFile& file, const Member& member) {
  uint8_t local[30];
  file.Read(member.header, local, sizeof local);
  if (Little<uint32_t>(local) != 0x04034b50) throw Error("its directory is damaged");
  const uint64_t start = member.header + sizeof local + Little<uint16_t>(local + 26) + Little<uint16_t>(local + 28);
  if (start > file.size() || member.compressed > file.size() - start) throw Error("it ends too early");
  std::unique_ptr<Source> source;
  if (member.method == 0 && member.size == member.compressed) {
    source = std::make_unique<FileSection>(file, start, member.size);
  } else if (member.method == 8 && member.size / 1032 <= member.compressed) {  // deflate's highest ratio
    source = std::make_unique<DeflatedSection>(FileSection(file, start, member.compressed), member.size);
  } else {
    throw Error("it is compressed in a way that cannot be read; write it with numpy.savez");
  }
  Crc32 crc;
  Tensor tensor = ReadArray(*source, crc);
  if (crc.value() != member.crc) throw Error("its check sum is wrong");
  return tensor;
}

// Returns what `read` returns of the file; its name is added to the errors.
template <typename Read>
auto ReadFile(const std::string& path, const Read& read) {
  try {
    InputFile file(path);
    return read(file);
  } catch (const Error& error) {
    throw Error("'" + path + "' cannot be read (" + error.what() + ")");
  }
}

std::string NpyHeader(const Tensor& tensor) {
  std::string text = std::string("{'descr': '") + EntryOf(tensor.dtype()).npy + "', 'fortran_order': False, 'shape': (";
  for (int i = 0; i < tensor.ndim(); ++i) text += std::to_string(tensor.size(i)) + (i + 1 < tensor.ndim() ? ", " : "");
  text += tensor.ndim() == 1 ? ",), }" : "), }";
  // The data starts at a multiple of 64.
  text.resize((10 + text.size() + 1 + 63) / 64 * 64 - 10 - 1, ' ');
  text += '\n';
  const char length[] = {static_cast<char>(text.size() & 0xFF), static_cast<char>(text.size() >> 8)};
  return std::string("\x93NUMPY\x01\x00", 8) + std::string(length, 2) + text;
}

// The numbers of a zip header, of two or four bytes each.
struct Fields {
  std::string bytes;
  Fields& Two(uint64_t value) { return Add(value, 2); }
  Fields& Four(uint64_t value) { return Add(value, 4); }
  Fields& Add(uint64_t value, int count) {
    for (int i = 0; i < count; ++i) bytes += static_cast<char>(value >> (8 * i));
    return *this;
  }
};

}  // namespace

Tensor Allocate(const std::vector<int64_t>& shape, DLDataType dtype) {
  return Tensor::FromNDAlloc(AllocateAligned(), tvm::ffi::ShapeView(shape.data(), shape.size()), dtype,
                             DLDevice{kDLCPU, 0});
}

std::string DtypeName(DLDataType dtype) { return EntryOf(dtype).name; }

Tensor ReadNpy(const std::string& path) {
  return ReadFile(path, [](InputFile& file) {
    FileSection source(file, 0, file.size());
    Crc32 ignored;  // a file of one array has no check sum
    return ReadArray(source, ignored);
  });
}

Arrays ReadNpz(const std::string& path) {
  return ReadFile(path, [](InputFile& file) {
    Arrays arrays;
    std::set<std::string> names;
    for (const Member& member : ReadDirectory(file)) {
      const size_t length = member.name.size();
      if (length < 4 || member.name.compare(length - 4, 4, ".npy") != 0) {
        throw Error("it holds '" + member.name + "', which is no array");
      }
      const std::string name = member.name.substr(0, length - 4);
      if (!names.insert(name).second) throw Error("it holds '" + name + "' twice");
      try {
        arrays.emplace_back(name, ReadMember(file, member));
      } catch (const Error& error) {
        throw Error("array '" + name + "': " + error.what());
      }
    }
    return arrays;
  });
}

void WriteNpz(const std::string& path, const Arrays& arrays) {
  constexpr uint64_t kLargest = 0xFFFFFFFE;  // larger sizes would need the format's 64-bit fields
  OutputFile file(path);
  std::string directory;
  uint64_t offset = 0;
  for (const auto& [name, tensor] : arrays) {
    const std::string header = NpyHeader(tensor), member = name + ".npy";
    const size_t data = tvm::ffi::GetDataSize(tensor);
    const uint64_t size = header.size() + data;
    if (size > kLargest || offset > kLargest - size || member.size() > 0xFFFF || arrays.size() > 0xFFFE) {
      throw Error("the arrays for '" + path + "' are too large for one file");
    }
    Crc32 crc;
    crc.Update(header.data(), header.size());
    crc.Update(tensor.data_ptr(), data);
    // The part that the local header and the directory share: version 2.0, names in UTF-8, no compression, the first of
    // January 1980.
    Fields common;
    common.Two(20).Two(0x800).Two(0).Two(0).Two(0x21).Four(crc.value()).Four(size).Four(size).Two(member.size()).Two(0);
    const std::string local = Fields().Four(0x04034b50).bytes + common.bytes + member;
    directory += Fields().Four(0x02014b50).Two(20).bytes + common.bytes +
                 Fields().Two(0).Two(0).Two(0).Four(0).Four(offset).bytes + member;
    file.Write(local);
    file.Write(header);
    file.Write(tensor.data_ptr(), data);
    offset += local.size() + size;
  }
  file.Write(directory);
  file.Write(Fields().Four(0x06054b50).Two(0).Two(0).Two(arrays.size()).Two(arrays.size()).Four(directory.size())
                 .Four(offset).Two(0).bytes);
  file.Close();
}

}  // namespace tvmflow

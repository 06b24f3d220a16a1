// Reading JSON documents that may be hostile.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tvmflow {

using Json = nlohmann::json;

// A value of a document with its path, by which errors name it. Its accessors throw Error for a value of another kind.
class Field {
 public:
  // `value` must outlive the field. `document` is the name of its document in messages, such as "its manifest".
  Field(const Json& value, std::string path, const char* document)
      : value_(&value), path_(std::move(path)), document_(document) {}

  // The value of a key of an object.
  Field At(const std::string& key) const;
  std::vector<std::pair<std::string, Field>> Members() const;
  std::vector<Field> Items() const;
  // A string that may stand in a message.
  const std::string& Text() const;
  // A string that is one of `words`.
  const std::string& Word(std::initializer_list<const char*> words) const;
  // A whole number from `minimum` to 2^63 - 1.
  int64_t Count(int64_t minimum = 0) const;
  bool Flag() const;

  bool IsNull() const;
  bool IsText() const;
  bool IsObject() const;

  // Throws Error: this field is not `expected`.
  [[noreturn]] void Refuse(const std::string& expected) const;

 private:
  const Json* value_;
  std::string path_;
  const char* document_;
};

// A whole JSON document.
class Document {
 public:
  // Parses a document, which messages call `name`. Throws Error for text that is not JSON in UTF-8, or that nests more
  // than 64 levels.
  Document(std::string_view text, const char* name);
  ~Document();

  // Throws Error unless `text` is this document as tvmflow writes it: sorted keys, two spaces of indentation, a line
  // feed at the end. Text that two parsers could read differently, such as a repeated key or an integer of more than
  // 64 bits, is never written like that.
  void CheckSpelling(std::string_view text) const;
  // The outermost value. The document must outlive it.
  Field root() const { return Field(*value_, "", name_); }

 private:
  std::unique_ptr<const Json> value_;
  const char* name_;
};

}  // namespace tvmflow

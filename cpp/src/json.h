// A strict reader of JSON.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tvmflow {

struct Member;

// A value of a document. What asks for a kind throws Error if the value is of another.
class Json {
 public:
  // Reads a whole document. Throws Error for anything that is not JSON in UTF-8, for repeated names and integers of
  // more than 64 bits.
  static Json Parse(std::string_view text);

  Json() = default;
  explicit Json(std::nullptr_t) {}
  template <typename T>
  explicit Json(T value) : value_(std::move(value)) {}

  bool IsNull() const { return std::holds_alternative<std::nullptr_t>(value_); }
  bool IsText() const { return std::holds_alternative<std::string>(value_); }
  const std::string& Text() const;
  // An integer that is not negative.
  int64_t Count() const;
  const std::vector<Json>& List() const;
  const std::vector<Member>& Members() const;
  // A member of an object; null if there is none.
  const Json* Find(std::string_view name) const;
  // The same, which must be there.
  const Json& At(std::string_view name) const;

 private:
  std::variant<std::nullptr_t, bool, int64_t, double, std::string, std::vector<Json>, std::vector<Member>> value_;
};

struct Member {
  std::string name;
  Json value;
};

bool IsUtf8(std::string_view text);

// A string as JSON writes it, with its quotes.
std::string Quoted(std::string_view text);

}  // namespace tvmflow

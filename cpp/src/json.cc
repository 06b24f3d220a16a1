#include "json.h"

#include <charconv>
#include <cstdio>
#include <cstdlib>

#include "tvmflow/error.h"

namespace tvmflow {
namespace {

constexpr int kDeepest = 64;

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Json Document() {
    Json value = Value(0);
    SkipSpace();
    if (at_ != text_.size()) Fail("the end");
    return value;
  }

 private:
  [[noreturn]] void Fail(const std::string& expected) const {
    throw Error("it is not JSON: expected " + expected + " at byte " + std::to_string(at_));
  }

  void SkipSpace() {
    while (at_ < text_.size() && std::string_view(" \t\r\n").find(text_[at_]) != std::string_view::npos) ++at_;
  }

  // The next character that is no space; 0 at the end.
  char Peek() {
    SkipSpace();
    return at_ < text_.size() ? text_[at_] : '\0';
  }

  bool Take(char wanted) {
    if (Peek() != wanted) return false;
    ++at_;
    return true;
  }

  void Expect(char wanted) {
    if (!Take(wanted)) Fail(std::string("'") + wanted + "'");
  }

  Json Value(int depth) {
    if (depth > kDeepest) Fail("fewer levels");
    switch (Peek()) {
      case '{':
        return Object(depth);
      case '[':
        return Array(depth);
      case '"':
        return Json(String());
      case 't':
        Word("true");
        return Json(true);
      case 'f':
        Word("false");
        return Json(false);
      case 'n':
        Word("null");
        return Json(nullptr);
      default:
        return Number();
    }
  }

  void Word(std::string_view word) {
    if (text_.substr(at_, word.size()) != word) Fail(std::string(word));
    at_ += word.size();
  }

  Json Object(int depth) {
    std::vector<Member> members;
    Expect('{');
    if (Take('}')) return Json(std::move(members));
    do {
      if (Peek() != '"') Fail("a name");
      Member member{String(), Json()};
      for (const Member& other : members) {
        if (other.name == member.name) Fail("a name that is not there already");
      }
      Expect(':');
      member.value = Value(depth + 1);
      members.push_back(std::move(member));
    } while (Take(','));
    Expect('}');
    return Json(std::move(members));
  }

  Json Array(int depth) {
    std::vector<Json> items;
    Expect('[');
    if (Take(']')) return Json(std::move(items));
    do {
      items.push_back(Value(depth + 1));
    } while (Take(','));
    Expect(']');
    return Json(std::move(items));
  }

  std::string String() {
    std::string result;
    ++at_;
    while (true) {
      if (at_ >= text_.size()) Fail("'\"'");
      char next = text_[at_++];
      if (next == '"') return result;
      if (static_cast<unsigned char>(next) < 0x20) Fail("no control character in a string");
      if (next == '\\') {
        Escape(result);
      } else {
        result += next;
      }
    }
  }

  void Escape(std::string& result) {
    static constexpr std::string_view kEscapes = "\"\\/bfnrt", kMeanings = "\"\\/\b\f\n\r\t";
    char kind = at_ < text_.size() ? text_[at_++] : '\0';
    if (kind == 'u') {
      unsigned code = Hex4();
      if (code >= 0xD800 && code < 0xDC00) {
        if (text_.substr(at_, 2) != "\\u") Fail("the second half of a surrogate pair");
        at_ += 2;
        unsigned low = Hex4();
        if (low < 0xDC00 || low >= 0xE000) Fail("the second half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else if (code >= 0xDC00 && code < 0xE000) {
        Fail("the first half of a surrogate pair");
      }
      AppendUtf8(result, code);
      return;
    }
    size_t index = kind == '\0' ? std::string_view::npos : kEscapes.find(kind);
    if (index == std::string_view::npos) Fail("an escape");
    result += kMeanings[index];
  }

  unsigned Hex4() {
    unsigned code = 0;
    std::string_view digits = text_.substr(at_, 4);
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), code, 16);
    if (error != std::errc() || digits.size() != 4 || end != digits.data() + 4) Fail("four hexadecimal digits");
    at_ += 4;
    return code;
  }

  static void AppendUtf8(std::string& result, unsigned code) {
    auto tail = [&](int shift) { result += static_cast<char>(0x80 | ((code >> shift) & 0x3F)); };
    if (code < 0x80) {
      result += static_cast<char>(code);
    } else if (code < 0x800) {
      result += static_cast<char>(0xC0 | (code >> 6));
      tail(0);
    } else if (code < 0x10000) {
      result += static_cast<char>(0xE0 | (code >> 12));
      tail(6), tail(0);
    } else {
      result += static_cast<char>(0xF0 | (code >> 18));
      tail(12), tail(6), tail(0);
    }
  }

  bool Digits() {
    size_t start = at_;
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') ++at_;
    return at_ > start;
  }

  bool Here(std::string_view any) const { return at_ < text_.size() && any.find(text_[at_]) != std::string_view::npos; }

  Json Number() {
    size_t start = at_;
    bool whole = true;
    if (Here("-")) ++at_;
    size_t first = at_;
    if (!Digits()) Fail("a value");
    if (text_[first] == '0' && at_ > first + 1) Fail("a number without leading zeros");
    if (Here(".")) {
      ++at_, whole = false;
      if (!Digits()) Fail("a digit");
    }
    if (Here("eE")) {
      ++at_, whole = false;
      if (Here("+-")) ++at_;
      if (!Digits()) Fail("a digit");
    }
    std::string number(text_.substr(start, at_ - start));
    if (!whole) return Json(std::strtod(number.c_str(), nullptr));
    int64_t value = 0;
    if (std::from_chars(number.data(), number.data() + number.size(), value).ec != std::errc()) {
      Fail("a number of at most 64 bits");
    }
    return Json(value);
  }

  std::string_view text_;
  size_t at_ = 0;
};

template <typename T, typename Variant>
const T& As(const Variant& value, const char* kind) {
  if (const T* found = std::get_if<T>(&value)) return *found;
  throw Error(std::string("a value is not ") + kind);
}

}  // namespace

Json Json::Parse(std::string_view text) {
  if (!IsUtf8(text)) throw Error("it is not JSON: it is not UTF-8");
  return Parser(text).Document();
}

const std::string& Json::Text() const { return As<std::string>(value_, "a string"); }

int64_t Json::Count() const {
  int64_t count = As<int64_t>(value_, "a count");
  if (count < 0) throw Error("a value is not a count");
  return count;
}

const std::vector<Json>& Json::List() const { return As<std::vector<Json>>(value_, "a list"); }

const std::vector<Member>& Json::Members() const { return As<std::vector<Member>>(value_, "a mapping"); }

const Json* Json::Find(std::string_view name) const {
  for (const Member& member : Members()) {
    if (member.name == name) return &member.value;
  }
  return nullptr;
}

const Json& Json::At(std::string_view name) const {
  if (const Json* found = Find(name)) return *found;
  throw Error("it lacks '" + std::string(name) + "'");
}

bool IsUtf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto first = static_cast<unsigned char>(text[i]);
    const size_t length = first < 0x80 ? 1 : first >= 0xC2 && first < 0xE0 ? 2 : first >= 0xE0 && first < 0xF0 ? 3 : 4;
    if (first >= 0xF5 || (first >= 0x80 && first < 0xC2) || length > text.size() - i) return false;
    uint32_t code = length == 1 ? first : first & (0x7F >> length);
    for (size_t j = 1; j < length; ++j) {
      const auto next = static_cast<unsigned char>(text[i + j]);
      if ((next & 0xC0) != 0x80) return false;
      code = code << 6 | (next & 0x3F);
    }
    // Overlong forms, halves of surrogate pairs, and what is beyond Unicode.
    if ((length == 3 && code < 0x800) || (code >= 0xD800 && code < 0xE000) ||
        (length == 4 && (code < 0x10000 || code > 0x10FFFF))) {
      return false;
    }
    i += length;
  }
  return true;
}

std::string Quoted(std::string_view text) {
  std::string result = "\"";
  for (char next : text) {
    char escape[8];
    if (next == '"' || next == '\\') {
      (result += '\\') += next;
    } else if (static_cast<unsigned char>(next) < 0x20) {
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(next));
      result += escape;
    } else {
      result += next;
    }
  }
  return result + "\"";
}

}  // namespace tvmflow

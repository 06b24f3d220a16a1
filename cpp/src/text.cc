#include "text.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <optional>
#include <utility>

namespace tvmflow {
namespace {

// The categories Cc, Cf, Co, Zl, Zp and Zs of Unicode 14, without the space.
constexpr std::pair<uint32_t, uint32_t> kUnprintable[] = {
    {0x0, 0x1F},         {0x7F, 0xA0},        {0xAD, 0xAD},        {0x600, 0x605},        {0x61C, 0x61C},
    {0x6DD, 0x6DD},      {0x70F, 0x70F},      {0x890, 0x891},      {0x8E2, 0x8E2},        {0x1680, 0x1680},
    {0x180E, 0x180E},    {0x2000, 0x200F},    {0x2028, 0x202F},    {0x205F, 0x2064},      {0x2066, 0x206F},
    {0x3000, 0x3000},    {0xE000, 0xF8FF},    {0xFEFF, 0xFEFF},    {0xFFF9, 0xFFFB},      {0x110BD, 0x110BD},
    {0x110CD, 0x110CD},  {0x13430, 0x13438},  {0x1BCA0, 0x1BCA3},  {0x1D173, 0x1D17A},    {0xE0001, 0xE0001},
    {0xE0020, 0xE007F},  {0xF0000, 0xFFFFD},  {0x100000, 0x10FFFD}};

struct Character {
  uint32_t code;
  size_t length;
};

// The character with which `text` begins; nothing if the text does not begin with one in UTF-8.
std::optional<Character> FirstCharacter(std::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  if (first < 0x80) return Character{first, 1};
  if (first < 0xC2 || first >= 0xF5) return std::nullopt;
  const size_t length = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
  if (length > text.size()) return std::nullopt;
  uint32_t code = first & (0x7F >> length);
  for (size_t i = 1; i < length; ++i) {
    const auto next = static_cast<unsigned char>(text[i]);
    if ((next & 0xC0) != 0x80) return std::nullopt;
    code = code << 6 | (next & 0x3F);
  }
  const bool overlong = (length == 3 && code < 0x800) || (length == 4 && code < 0x10000);
  const bool surrogate = code >= 0xD800 && code < 0xE000;
  if (overlong || surrogate || code > 0x10FFFF) return std::nullopt;
  return Character{code, length};
}

bool IsPrintable(uint32_t code) {
  return std::none_of(std::begin(kUnprintable), std::end(kUnprintable),
                      [code](const auto& range) { return range.first <= code && code <= range.second; });
}

}  // namespace

bool IsPrintable(std::string_view text) {
  while (!text.empty()) {
    const std::optional<Character> character = FirstCharacter(text);
    if (!character || !IsPrintable(character->code)) return false;
    text.remove_prefix(character->length);
  }
  return true;
}

std::string Escape(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::optional<Character> character = FirstCharacter(text);
    const size_t length = character ? character->length : 1;
    if (character && IsPrintable(character->code)) {
      result += text.substr(0, length);
    } else {
      for (char byte : text.substr(0, length)) {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\x%02x", static_cast<unsigned>(static_cast<unsigned char>(byte)));
        result += escape;
      }
    }
    text.remove_prefix(length);
  }
  return result;
}

std::string Hexadecimal(const unsigned char* bytes, size_t size) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < size; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

}  // namespace tvmflow

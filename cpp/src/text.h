// Text from files that may be hostile.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tvmflow {

// Whether text is UTF-8 and every character of it is printable by the rule of Python's `str.isprintable`, save that
// code points without a character pass. Control, format and separator characters are not printable; the space is.
bool IsPrintable(std::string_view text);

// The text with every byte of an unprintable character as `\xNN`.
std::string Escape(std::string_view text);

// Bytes as lower-case hexadecimal digits.
std::string Hexadecimal(const unsigned char* bytes, size_t size);

}  // namespace tvmflow

#include "json.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

#include "text.h"
#include "tvmflow/error.h"

namespace tvmflow {
namespace {

constexpr int kMaxDepth = 64;

Json Parse(std::string_view text) {
  const auto check_depth = [](int depth, Json::parse_event_t event, Json&) {
    const bool opens = event == Json::parse_event_t::object_start || event == Json::parse_event_t::array_start;
    if (opens && depth >= kMaxDepth) throw Error("its JSON nests more than " + std::to_string(kMaxDepth) + " levels");
    return true;
  };
  try {
    return Json::parse(text, check_depth);
  } catch (const Json::parse_error& error) {
    throw Error("it is not JSON at byte " + std::to_string(error.byte));
  } catch (const Json::exception&) {
    throw Error("it is not JSON: a number is too large");
  }
}

}  // namespace

Document::Document(std::string_view text, const char* name)
    : value_(std::make_unique<const Json>(Parse(text))), name_(name) {}

Document::~Document() = default;

void Document::CheckSpelling(std::string_view text) const {
  if (value_->dump(2) + "\n" != text) throw Error("its JSON is not spelled as tvmflow spells it");
}

bool Field::IsNull() const { return value_->is_null(); }

bool Field::IsText() const { return value_->is_string(); }

bool Field::IsObject() const { return value_->is_object(); }

void Field::Refuse(const std::string& expected) const {
  const std::string subject = path_.empty() ? document_ : "'" + Escape(path_) + "' in " + document_;
  throw Error(subject + " is not " + expected);
}

Field Field::At(const std::string& key) const {
  if (!value_->is_object()) Refuse("an object");
  const std::string path = path_.empty() ? key : path_ + "." + key;
  const auto member = value_->find(key);
  if (member == value_->end()) throw Error(document_ + (" lacks '" + Escape(path) + "'"));
  return Field(*member, path, document_);
}

std::vector<std::pair<std::string, Field>> Field::Members() const {
  if (!value_->is_object()) Refuse("an object");
  std::vector<std::pair<std::string, Field>> members;
  for (const auto& [key, value] : value_->items()) members.emplace_back(key, Field(value, path_ + "." + key, document_));
  return members;
}

std::vector<Field> Field::Items() const {
  if (!value_->is_array()) Refuse("a list");
  std::vector<Field> items;
  for (size_t i = 0; i < value_->size(); ++i) {
    items.push_back(Field((*value_)[i], path_ + "[" + std::to_string(i) + "]", document_));
  }
  return items;
}

const std::string& Field::Text() const {
  if (!value_->is_string()) Refuse("a string");
  const auto& text = value_->get_ref<const std::string&>();
  if (!IsPrintable(text)) Refuse("printable");
  return text;
}

const std::string& Field::Word(std::initializer_list<const char*> words) const {
  const std::string& text = Text();
  if (std::find(words.begin(), words.end(), text) == words.end()) {
    std::string list;
    for (const char* word : words) list += (list.empty() ? "" : ", ") + std::string(word);
    Refuse("one of " + list);
  }
  return text;
}

bool Field::Flag() const {
  if (!value_->is_boolean()) Refuse("true or false");
  return value_->get<bool>();
}

int64_t Field::Count(int64_t minimum) const {
  constexpr auto kMaximum = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  const bool fits = !value_->is_number_unsigned() || value_->get<uint64_t>() <= kMaximum;
  const bool is_count = value_->is_number_integer() && fits && value_->get<int64_t>() >= minimum;
  if (!is_count) Refuse("a whole number from " + std::to_string(minimum) + " to 2^63 - 1");
  return value_->get<int64_t>();
}

}  // namespace tvmflow

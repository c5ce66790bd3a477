#include "plan/reason.h"

#include <string_view>

namespace flashattn_ext {
namespace {

void replace_all(std::string& text, std::string_view what, const std::string& with) {
  for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at)) {
    text.replace(at, what.size(), with);
    at += with.size();
  }
}

}  // namespace

std::string Reason::str() const {
  std::string sentence = text == nullptr ? "" : text;
  replace_all(sentence, "{a}", std::to_string(a));
  replace_all(sentence, "{b}", std::to_string(b));
  replace_all(sentence, "{name}", name);
  return sentence;
}

}  // namespace flashattn_ext

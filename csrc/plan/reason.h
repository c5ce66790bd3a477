// Why a family does not run a problem: a sentence with its numbers, put together only when somebody
// reads it, so that a rejection costs a call nothing.
#pragma once

#include <cstdint>
#include <string>

namespace flashattn_ext {

struct Reason {
  const char* text = nullptr;  // nullptr: no objection. May hold {a}, {b} and {name}.
  int64_t a = 0;
  int64_t b = 0;
  const char* name = "";

  explicit operator bool() const { return text != nullptr; }
  std::string str() const;
};

}  // namespace flashattn_ext

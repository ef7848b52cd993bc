// unpatched_split.cpp: llama.cpp's src/unicode.cpp without patch 0010, in a namespace of its own.
#include "splitters.h"
#include "src/unicode-data.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <map>
#include <regex>
#include <stdexcept>
#include <unordered_map>
#include <utility>

namespace unpatched {
#include "unpatched/src/unicode.cpp" // written by scripts/instrument.sh
}

std::vector<std::string> unpatched_split(const std::string & text, const splitter & exprs,
                                         bool byte_encode) {
    return unpatched::unicode_regex_split(text, exprs, byte_encode);
}

// splitters.h: every pre-tokeniser of llama.cpp as it is built here, and as it was before patch
// 0010.
#ifndef DRAFTHOUSE_SPLITTERS_H
#define DRAFTHOUSE_SPLITTERS_H

#include <string>
#include <vector>

using splitter = std::vector<std::string>; // regular expressions, one after the other

// As llama-vocab.cpp lists them; scripts/instrument.sh writes the file.
inline const std::vector<splitter> & all_splitters() {
    static const std::vector<splitter> all = {
#include "splitters.inc"
    };
    return all;
}

// Splits a text with std::regex. Recurses for every character: only for texts of a few thousand.
std::vector<std::string> unpatched_split(const std::string & text, const splitter & exprs,
                                         bool byte_encode);

#endif

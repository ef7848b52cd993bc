// split_test.cpp: every pre-tokeniser splits a text as it did before patch 0010; where memory runs
// out it says that and nothing else.
//
// split_test SEED N FILE…: the files, and N random texts of one to sixty places, with every list of
// expressions.
#include "src/unicode.h" // common/ has another

#include "splitters.h"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <new>
#include <random>

extern "C" void __sanitizer_cov_trace_pc() {} // of the objects that tokenizer_counts shares

namespace {
size_t n_left = 0; // allocations until one fails; 0: none does
}

void * operator new(size_t size) {
    void * memory = n_left > 0 && --n_left == 0 ? nullptr : std::malloc(size > 0 ? size : 1);
    return memory != nullptr ? memory : throw std::bad_alloc();
}
void operator delete(void * memory) noexcept {
    std::free(memory);
}
void operator delete(void * memory, size_t) noexcept {
    std::free(memory);
}

namespace {

constexpr size_t PIECE = 3000; // bytes: std::regex recurses

// What the expressions tell apart: classes, scripts, borders of their ranges, and code points on
// neither side.
const std::vector<uint32_t> & marked_code_points() {
    static const std::vector<uint32_t> found = [] {
        std::vector<uint32_t> result;
        for (uint32_t c = 0; c < 0x80; ++c) {
            result.push_back(c);
        }
        for (const splitter & exprs : all_splitters()) {
            for (const std::string & expr : exprs) {
                for (const uint32_t c : unicode_cpts_from_utf8(expr)) {
                    if (c >= 0x80) {
                        result.insert(result.end(), {c - 1, c, c + 1});
                    }
                }
            }
        }
        for (const uint32_t c :
             {0x85,   0xA0,   0xB2,   0xBD,    0x1C5,   0x2B0,   0x300,    0x301,
              0x5D0,  0x600,  0x627,  0x661,   0x915,   0x93F,   0x94D,    0xE31,
              0x200B, 0x200C, 0x200D, 0x2028,  0x2167,  0x2460,  0x3000,   0x3400,
              0xFE0F, 0xFEFF, 0xFF10, 0x1F1E6, 0x1F468, 0x20000, 0x10FFFF, 0xE000}) {
            for (int i = 0; i < 8; ++i) { // as often as the borders
                result.push_back(c);
            }
        }
        for (const char c : {' ', ' ', '\n', '\r', '\'', 's', 'L', 'l', 'a', 'B', '1', '!', '/'}) {
            for (int i = 0; i < 12; ++i) {
                result.push_back(static_cast<uint32_t>(c));
            }
        }
        return result;
    }();
    return found;
}

class random_texts {
public:
    explicit random_texts(unsigned seed) : rng_(seed) {}

    std::string next() {
        std::vector<uint32_t> alphabet;
        for (size_t n = 1 + below(8); n > 0; --n) {
            alphabet.push_back(any());
        }
        const bool is_wide = below(4) == 0;
        const bool has_runs = below(4) == 0;
        std::string text;
        for (size_t n = below(60); n > 0; --n) {
            const uint32_t c = is_wide ? any() : alphabet[below(alphabet.size())];
            const size_t n_run =
                has_runs && below(20) == 0 ? 1 + below(700) : 1 + below(4) / 3 * below(9);
            for (size_t i = 0; i < n_run; ++i) {
                text += unicode_cpt_to_utf8(c);
            }
        }
        for (size_t n = below(10) == 0 && !text.empty() ? 3 : 0; n > 0; --n) {
            text[below(text.size())] = static_cast<char>(below(256)); // not UTF-8 any more
        }
        return text;
    }

private:
    size_t below(size_t n) { return rng_() % n; }

    uint32_t any() {
        const uint32_t c = below(4) == 0 ? static_cast<uint32_t>(below(0x3100))
                                         : marked_code_points()[below(marked_code_points().size())];
        return c >= 0xD800 && c < 0xE000 ? 'x' : c;
    }

    std::mt19937 rng_;
};

// Words without text (std::regex gives some where an expression matches nothing) make no tokens.
std::string words(std::vector<std::string> (*split)(const std::string &, const splitter &, bool),
                  const std::string & text, const splitter & exprs, bool byte_encode) {
    std::string result;
    try {
        for (const std::string & word : split(text, exprs, byte_encode)) {
            result += word.empty() ? "" : std::to_string(word.size()) + ":" + word;
        }
    } catch (const std::exception & e) {
        result = std::string("throws ") + e.what();
    }
    return result;
}

size_t n_compared = 0;
size_t n_different = 0;

void compare(const std::string & text) {
    for (size_t i = 0; i < all_splitters().size(); ++i) {
        for (const bool byte_encode : {true, false}) {
            const splitter & exprs = all_splitters()[i];
            ++n_compared;
            if (words(unicode_regex_split, text, exprs, byte_encode) !=
                words(unpatched_split, text, exprs, byte_encode)) {
                ++n_different;
                std::printf("different words with expressions %zu, text in hex:", i);
                for (const char c : text) {
                    std::printf(" %02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
                }
                std::printf("\n");
            }
        }
    }
}

// Has each allocation of a split fail in turn: bad_alloc is what the caller is to see.
void run_out_of_memory(const std::string & text) {
    for (size_t i = 0; i < all_splitters().size(); ++i) {
        bool is_done = false;
        for (size_t n = 1; !is_done; ++n) {
            try {
                n_left = n;
                is_done = !unicode_regex_split(text, all_splitters()[i], true).empty();
            } catch (const std::bad_alloc &) {
            } catch (const std::exception & e) {
                ++n_different;
                std::printf("no memory, and expressions %zu say: %s\n", i, e.what());
                is_done = true;
            }
            n_left = 0;
        }
    }
}

} // namespace

int main(int argc, char ** argv) {
    random_texts texts(argc > 1 ? static_cast<unsigned>(std::atoi(argv[1])) : 1);
    for (int i = 3; i < argc; ++i) {
        std::ifstream file(argv[i], std::ios::binary);
        const std::string text{std::istreambuf_iterator<char>(file), {}};
        for (size_t at = 0; at < text.size(); at += PIECE) {
            compare(text.substr(at, PIECE));
        }
    }
    for (int n = argc > 2 ? std::atoi(argv[2]) : 100; n > 0; --n) {
        compare(texts.next());
    }
    run_out_of_memory("It\u2019s a 4\u00e9 \u4e2d\n  \n1234 x!");
    std::printf("%zu lists of expressions, %zu comparisons, %zu differ\n", all_splitters().size(),
                n_compared, n_different);
    return n_different == 0 ? 0 : 1;
}

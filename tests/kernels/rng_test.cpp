// A random generator as text (patch 0003): what one standard library writes, the other reads.
//
//   rng_test write 700    prints a generator that has given 700 numbers, and a word behind it
//   rng_test read         reads that and prints the word and the next 1,300 numbers, or "refused"
#include "llama-rng.h"

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>

namespace {

void write(unsigned long long n_drawn) {
    std::mt19937 rng(4711);
    rng.discard(n_drawn);
    llama_rng_write(std::cout, rng);
    std::cout << "word\n";
}

void read() {
    std::mt19937 rng;
    llama_rng_read(std::cin, rng);
    std::string word;
    std::cin >> word;
    if (!std::cin) {
        std::cout << "refused\n";
        return;
    }
    std::cout << word;
    for (int i = 0; i < 1300; ++i) {
        std::cout << ' ' << rng();
    }
    std::cout << '\n';
}

} // namespace

int main(int argc, char ** argv) {
    const std::string verb = argc > 1 ? argv[1] : "";
    if (verb == "write" && argc == 3) {
        write(std::strtoull(argv[2], nullptr, 10));
    } else if (verb == "read") {
        read();
    } else {
        return 2;
    }
    return 0;
}

// Memory of snapshots: what is given back comes back, no room overlaps another, and no more is kept
// than is said.
//
//   room_test    prints "ok", or what differs
#include "spec/rooms.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            std::printf("line %d: %s\n", __LINE__, #condition);                                    \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (false)

namespace {

using drafthouse::room_pool;

constexpr size_t MiB = 1u << 20;

struct room {
    uint8_t * data;
    size_t n;
    uint8_t mark;
};

// Marks each page of a room, and its last byte.
void mark(const room & it) {
    for (size_t at = 0; at < it.n; at += 4096) {
        it.data[at] = it.mark;
    }
    it.data[it.n - 1] = it.mark;
}

bool is_marked(const room & it) {
    for (size_t at = 0; at < it.n; at += 4096) {
        if (it.data[at] != it.mark) {
            return false;
        }
    }
    return it.data[it.n - 1] == it.mark;
}

uint8_t * take(room_pool & pool, size_t n) {
    auto * data = static_cast<uint8_t *>(pool.take(n));
    REQUIRE(data != nullptr);
    return data;
}

// Rooms of any sizes, taken and given back in any order, as by several tenants.
void test_rooms_are_their_own(room_pool & pool, unsigned seed, bool is_alone) {
    std::mt19937 chance(seed);
    std::vector<room> held;
    size_t n_held = 0;
    size_t n_most = 0;
    for (int i = 0; i < 3000; ++i) {
        if (held.size() < 4 || (held.size() < 24 && chance() % 2 == 0)) {
            const size_t n = chance() % 8 == 0 ? 1 + chance() % MiB : MiB + chance() % (6 * MiB);
            held.push_back({take(pool, n), n, static_cast<uint8_t>(1 + chance() % 255)});
            mark(held.back());
            n_held += n >= MiB ? n : 0; // others change nothing in what is kept
            n_most = std::max(n_most, n_held);
            continue;
        }
        const size_t place = chance() % held.size();
        const room it = held[place];
        REQUIRE(is_marked(it));
        held.erase(held.begin() + static_cast<std::ptrdiff_t>(place));
        pool.give(it.data, it.n);
        n_held -= it.n >= MiB ? it.n : 0;
        const bool is_told = is_alone && it.n >= MiB;
        const size_t n_pages = 25 * 4096; // which rooms are rounded up by
        REQUIRE(!is_told || pool.n_kept() <= std::max(it.n, n_held / 4) + n_pages);
        REQUIRE(!is_told || pool.n_kept() + n_held <= n_most + n_pages);
    }
    for (const room & it : held) {
        REQUIRE(is_marked(it));
        pool.give(it.data, it.n);
    }
}

#ifdef __linux__

bool begins_with(const uint8_t * data, size_t n, uint8_t value) {
    return std::all_of(data, data + n, [value](uint8_t it) { return it == value; });
}

void test_pages_come_back() {
    room_pool pool;
    uint8_t * first = take(pool, 8 * MiB);
    std::memset(first, 7, 8 * MiB);
    pool.give(first, 8 * MiB);
    REQUIRE(pool.n_kept() == 8 * MiB);

    // A smaller one leaves the rest to the next, which is as long.
    uint8_t * small = take(pool, 3 * MiB);
    REQUIRE(begins_with(small, 3 * MiB, 7) && pool.n_kept() == 5 * MiB);
    uint8_t * rest = take(pool, 5 * MiB);
    REQUIRE(begins_with(rest, 5 * MiB, 7) && pool.n_kept() == 0);
    pool.give(small, 3 * MiB);

    // A larger one has them, and fresh ones behind.
    uint8_t * large = take(pool, 11 * MiB);
    REQUIRE(begins_with(large, 3 * MiB, 7) && pool.n_kept() == 0);
    REQUIRE(begins_with(large + 3 * MiB, 8 * MiB, 0));
    std::memset(large, 9, 11 * MiB);
    REQUIRE(begins_with(rest, 5 * MiB, 7));
    pool.give(large, 11 * MiB);

    // What is too little for a room is not kept.
    uint8_t * most = take(pool, 10 * MiB + 1);
    REQUIRE(begins_with(most, 10 * MiB + 1, 9) && pool.n_kept() == 0);
    pool.give(most, 10 * MiB + 1);
    pool.give(rest, 5 * MiB);
    REQUIRE(pool.n_kept() == 5 * MiB); // as much as came last: nothing is taken now
}

void test_a_quarter_of_what_is_taken_is_kept() {
    room_pool pool;
    std::vector<uint8_t *> held;
    for (int i = 0; i < 20; ++i) {
        held.push_back(take(pool, 2 * MiB));
    }
    for (int n_left = 19; n_left >= 0; --n_left) {
        pool.give(held.back(), 2 * MiB);
        held.pop_back();
        const size_t n_given = static_cast<size_t>(20 - n_left) * 2 * MiB;
        const size_t n_most = std::max(2 * MiB, static_cast<size_t>(n_left) * 2 * MiB / 4);
        REQUIRE(pool.n_kept() == std::min(n_given, n_most / (2 * MiB) * (2 * MiB)));
    }
}

#else

void test_pages_come_back() {}
void test_a_quarter_of_what_is_taken_is_kept() {}

#endif

} // namespace

int main() {
    test_pages_come_back();
    test_a_quarter_of_what_is_taken_is_kept();
    room_pool pool;
    test_rooms_are_their_own(pool, 1, true);
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 3; ++i) {
        threads.emplace_back([&pool, i] { test_rooms_are_their_own(pool, 2 + i, false); });
    }
    for (std::thread & each : threads) {
        each.join();
    }
    REQUIRE(pool.take(SIZE_MAX / 2) == nullptr);
    std::printf("ok\n");
    return 0;
}

// See rooms.hpp.

#include "rooms.hpp"

#include "spec.h"

#include <algorithm>
#include <cstdlib>
#include <new>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace drafthouse {

#ifdef __linux__

namespace {

constexpr size_t LEAST_BYTES = 1 << 20;
constexpr size_t KEPT_SHARE = 4; // a quarter of what is taken

size_t whole_pages(size_t n) {
    static const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return (n + page - 1) / page * page;
}

void * map(size_t n) {
    void * data = mmap(nullptr, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return data == MAP_FAILED ? nullptr : data;
}

} // namespace

room_pool::~room_pool() {
    for (const block & each : kept_) {
        munmap(each.data, each.n);
    }
}

// Takes out of what is kept the smallest block that is large enough, or else the largest.
room_pool::block room_pool::find(size_t n) {
    const auto is_worse = [n](const block & a, const block & b) {
        const bool fits = a.n >= n;
        return fits == (b.n >= n) ? (fits ? a.n > b.n : a.n < b.n) : !fits;
    };
    const auto best = std::max_element(kept_.begin(), kept_.end(), is_worse);
    if (best == kept_.end()) {
        return {};
    }
    const block found = *best;
    kept_.erase(best);
    n_kept_ -= found.n;
    return found;
}

// Has the smallest blocks leave until n bytes may be kept besides, n_most in all, n at least.
void room_pool::make_room(size_t n, size_t n_most, std::vector<block> & out) {
    const auto is_smaller = [](const block & a, const block & b) { return a.n < b.n; };
    while (!kept_.empty() && n_kept_ + n > n_most) {
        const auto least = std::min_element(kept_.begin(), kept_.end(), is_smaller);
        out.push_back(*least);
        n_kept_ -= least->n;
        kept_.erase(least);
    }
}

void * room_pool::take(size_t n) {
    if (n < LEAST_BYTES) {
        return std::malloc(n);
    }
    n = whole_pages(n);
    block found;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        found = find(n);
        if (found.n > n) { // the end is kept, unless it is too small for any
            const block end = {static_cast<char *>(found.data) + n, found.n - n};
            found.n = n;
            if (end.n >= LEAST_BYTES) {
                kept_.push_back(end); // no more than were there
                n_kept_ += end.n;
            } else {
                munmap(end.data, end.n);
            }
        }
    }
    // Of a smaller one the pages stay, and fresh ones follow them.
    void * room = found.n == 0 ? nullptr : found.data;
    if (found.n != 0 && found.n < n) {
        room = mremap(found.data, found.n, n, MREMAP_MAYMOVE);
        if (room == MAP_FAILED) {
            munmap(found.data, found.n);
            room = nullptr;
        }
    }
    room = room == nullptr ? map(n) : room;
    if (room != nullptr) {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_taken_ += n;
        n_most_ = std::max(n_most_, n_taken_);
    }
    return room;
}

void room_pool::give(void * room, size_t n) noexcept {
    if (n < LEAST_BYTES) {
        std::free(room);
        return;
    }
    n = whole_pages(n);
    std::vector<block> out;
    try {
        const std::lock_guard<std::mutex> lock(mutex_);
        n_taken_ -= n;
        out.reserve(kept_.size());
        kept_.reserve(kept_.size() + 1);
        // It was among what was taken at once.
        make_room(n, std::min(n_most_ - n_taken_, std::max(n, n_taken_ / KEPT_SHARE)), out);
        kept_.push_back({room, n});
        n_kept_ += n;
    } catch (const std::bad_alloc &) { // of `reserve`: nothing has changed in what is kept
        munmap(room, n);
    }
    for (const block & each : out) {
        munmap(each.data, each.n);
    }
}

#else

room_pool::~room_pool() = default;

void * room_pool::take(size_t n) {
    return std::malloc(n);
}

void room_pool::give(void * room, size_t /*n*/) noexcept {
    std::free(room);
}

#endif

size_t room_pool::n_kept() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return n_kept_;
}

} // namespace drafthouse

namespace {

drafthouse::room_pool & rooms() {
    static auto * pool = new drafthouse::room_pool; // snapshots may outlive all else
    return *pool;
}

} // namespace

void * spec_room_take(size_t n) {
    try {
        return rooms().take(n);
    } catch (const std::exception &) {
        return nullptr;
    }
}

void spec_room_give(void * room, size_t n) {
    if (room != nullptr) {
        rooms().give(room, n);
    }
}

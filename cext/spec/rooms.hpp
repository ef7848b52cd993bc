// Memory for snapshots. What one gives back is kept for the next: a system gives fresh memory page
// by page, and the host of a virtual machine may take several times as long as writing does.

#ifndef DRAFTHOUSE_SPEC_ROOMS_HPP
#define DRAFTHOUSE_SPEC_ROOMS_HPP

#include <cstddef>
#include <mutex>
#include <vector>

namespace drafthouse {

// Rooms below a MiB are the allocator's, which keeps them itself; so are all but on Linux. Any
// thread.
class room_pool {
public:
    room_pool() = default;
    room_pool(const room_pool &) = delete;
    room_pool & operator=(const room_pool &) = delete;
    ~room_pool();

    // Returns n bytes, of any content; nullptr: there is no memory.
    void * take(size_t n);
    // Takes back what `take` gave for n bytes.
    void give(void * room, size_t n) noexcept;
    // Bytes that are kept: as many as were given back last, or a quarter of what is taken, at most;
    // and with what is taken no more than was taken at once before.
    size_t n_kept() const;

private:
    struct block {
        void * data = nullptr;
        size_t n = 0;
    };

    block find(size_t n);
    void make_room(size_t n, size_t n_most, std::vector<block> & out);

    mutable std::mutex mutex_;
    std::vector<block> kept_; // whole pages
    size_t n_kept_ = 0;
    size_t n_taken_ = 0;
    size_t n_most_ = 0; // taken at once
};

} // namespace drafthouse

#endif

// DRY breakers: found once for a model and a text, however many samplers name them.

#include "internal.hpp"

#include <algorithm>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

// Of one model.
constexpr size_t BREAKER_TEXTS_MAX = 256;
constexpr size_t BREAKER_BYTES_MAX = size_t{32} << 20;

} // namespace

// The texts whose tokens are known, the least recently used last.
struct breaker_cache::entries {
    struct entry {
        std::string text;
        dry_breaker found;
        size_t n_bytes;
    };

    std::mutex lock;
    std::list<entry> by_use;
    std::unordered_map<std::string, std::list<entry>::iterator> by_text;
    size_t n_bytes = 0;
    int64_t n_searched = 0;

    dry_breaker find(const std::string & text) {
        const auto at = by_text.find(text);
        if (at == by_text.end()) {
            return nullptr;
        }
        by_use.splice(by_use.begin(), by_use, at->second);
        return at->second->found;
    }

    void put(const std::string & text, const dry_breaker & found) {
        if (by_text.count(text) != 0) {
            return; // another thread was quicker
        }
        const size_t n = text.size() + breaker_bytes(found);
        if (n > BREAKER_BYTES_MAX) {
            return;
        }
        std::list<entry> made;
        made.push_front({text, found, n});
        by_text[text] = made.begin();
        by_use.splice(by_use.begin(), made); // from here on nothing throws
        n_bytes += n;
        while (n_bytes > BREAKER_BYTES_MAX || by_use.size() > BREAKER_TEXTS_MAX) {
            n_bytes -= by_use.back().n_bytes;
            by_text.erase(by_use.back().text);
            by_use.pop_back();
        }
    }
};

breaker_cache::breaker_cache() : entries_(std::make_unique<entries>()) {}

breaker_cache::~breaker_cache() = default;

// The breakers of these texts, in their order. What is not known is looked for without the lock:
// the vocabulary is walked through once for all of it.
std::vector<dry_breaker> breaker_cache::find(const llama_vocab * vocab,
                                             const std::vector<std::string> & texts) {
    std::vector<dry_breaker> found(texts.size());
    std::vector<std::string> unknown;
    {
        const std::lock_guard<std::mutex> guard(entries_->lock);
        for (size_t i = 0; i < texts.size(); ++i) {
            found[i] = entries_->find(texts[i]);
            if (!found[i] && std::find(unknown.begin(), unknown.end(), texts[i]) == unknown.end()) {
                unknown.push_back(texts[i]);
            }
        }
        entries_->n_searched += static_cast<int64_t>(unknown.size());
    }
    if (unknown.empty()) {
        return found;
    }
    const std::vector<dry_breaker> searched = find_breakers(vocab, unknown);
    const std::lock_guard<std::mutex> guard(entries_->lock);
    for (size_t i = 0; i < unknown.size(); ++i) {
        for (size_t k = 0; k < texts.size(); ++k) {
            found[k] = texts[k] == unknown[i] ? searched[i] : found[k];
        }
        entries_->put(unknown[i], searched[i]);
    }
    return found;
}

spec_breaker_stats breaker_cache::stats() const {
    const std::lock_guard<std::mutex> guard(entries_->lock);
    spec_breaker_stats s = {};
    s.n_searched = entries_->n_searched;
    s.n_held = static_cast<int32_t>(entries_->by_use.size());
    s.n_bytes = static_cast<int64_t>(entries_->n_bytes);
    return s;
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_model_get_breaker_stats(const spec_model * model, spec_breaker_stats * out) {
    return guarded([&] { deref(out, "out") = deref(model, "model").breakers->stats(); });
}

} // extern "C"

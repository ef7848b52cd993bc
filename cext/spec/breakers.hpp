// The DRY breakers of a model that are known.

#ifndef DRAFTHOUSE_SPEC_BREAKERS_HPP
#define DRAFTHOUSE_SPEC_BREAKERS_HPP

#include "spec.h"

#include "llama.h"

#include <memory>
#include <string>
#include <vector>

struct llama_dry_breaker; // the tokens of a DRY breaker (patch 0011)

namespace drafthouse {

using dry_breaker = std::shared_ptr<const llama_dry_breaker>;

// Least recently used ones are left out. Any thread.
class breaker_cache {
public:
    breaker_cache();
    breaker_cache(const breaker_cache &) = delete;
    breaker_cache & operator=(const breaker_cache &) = delete;
    ~breaker_cache();

    std::vector<dry_breaker> find(const llama_vocab * vocab,
                                  const std::vector<std::string> & texts);
    spec_breaker_stats stats() const;

private:
    struct entries;
    std::unique_ptr<entries> entries_;
};

} // namespace drafthouse

#endif

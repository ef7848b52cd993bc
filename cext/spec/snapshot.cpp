// Snapshots: a sequence as bytes.

#include "internal.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <locale>
#include <memory>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

constexpr char SNAPSHOT_MAGIC[8] = {'D', 'R', 'A', 'F', 'T', 'S', 'E', 'Q'};
constexpr uint32_t SNAPSHOT_FORMAT = 8;
constexpr size_t CHECKSUM_BYTES = sizeof(uint64_t);

// What a snapshot is bound to. All members have 8 bytes, so that there is no padding.
struct snapshot_header {
    char magic[8];
    uint64_t format;
    uint64_t n_bytes; // of the whole
    uint64_t llama_version;
    uint64_t target;
    uint64_t draft;
    int64_t draft_type;
    int64_t n_ctx_seq;
    int64_t n_draft_max;
    int64_t n_rs_seq;
    int64_t n_streams; // separate KV caches; 1 when all sequences share one
    int64_t flash_attention;
    int64_t probabilistic;
    int64_t n_min;
    double p_min;
    uint64_t tag;         // whose sequence it is
    uint64_t has_sampler; // 0: tokens and cells for another sampler to go on from
    int64_t types[4];     // of cells: k, v, those of the drafter
    int64_t is_swa_full;
    int64_t rope_scaling;
    int64_t yarn_orig_ctx;
    double rope[6]; // the numbers of rope_setting
};

// What cells are and how positions are turned, of both contexts.
void bind_settings(snapshot_header & h, const spec_engine & engine) {
    const context_setting target = setting_of(engine.target.get());
    const context_setting draft = engine.draft ? setting_of(engine.draft.get()) : context_setting{};
    const int32_t types[4] = {target.type_k, target.type_v, draft.type_k, draft.type_v};
    std::copy(std::begin(types), std::end(types), h.types);
    h.is_swa_full = target.is_swa_full;
    h.rope_scaling = target.rope.scaling;
    h.yarn_orig_ctx = target.rope.orig_ctx;
    double * at = h.rope;
    for (const auto & [name, value] : target.rope.numbers()) {
        *at++ = static_cast<double>(value);
    }
}

snapshot_header header_of(const spec_engine & engine) {
    const spec_engine_limits & l = engine.limits;
    const char * version = llama_version();
    snapshot_header h = {};
    std::memcpy(h.magic, SNAPSHOT_MAGIC, sizeof h.magic);
    h.format = SNAPSHOT_FORMAT;
    h.llama_version = digest(sizeof(void *), version, std::strlen(version));
    h.target = engine.target_model->fingerprint;
    h.draft = engine.draft_model != nullptr ? engine.draft_model->fingerprint : 0;
    h.draft_type = l.draft_type;
    h.n_ctx_seq = l.n_ctx_seq;
    h.n_draft_max = l.n_draft_max;
    h.n_rs_seq = l.n_rs_seq;
    h.n_streams = l.kv_unified ? 1 : l.n_seq_max;
    h.flash_attention = engine.params.flash_attention;
    h.probabilistic = engine.params.probabilistic;
    h.n_min = engine.params.n_min;
    h.p_min = static_cast<double>(engine.params.p_min);
    bind_settings(h, engine);
    return h;
}

// Writes values to a string, or reads them from bytes. Both have the same members, so that one
// function describes the layout of a thing for both ways.
struct snapshot_writer {
    std::string bytes;

    template <typename T> void value(const T & x) {
        static_assert(std::is_arithmetic<T>::value, "no padding, no pointers");
        bytes.append(reinterpret_cast<const char *>(&x), sizeof x);
    }

    template <typename T> void array(const T & items) { // a vector or a string
        using item = typename T::value_type;
        static_assert(std::is_trivially_copyable<item>::value, "written as bytes");
        value(static_cast<uint64_t>(items.size()));
        bytes.append(reinterpret_cast<const char *>(items.data()), items.size() * sizeof(item));
    }
};

struct snapshot_reader {
    const uint8_t * at;
    const uint8_t * end;

    const uint8_t * take(uint64_t n) {
        if (n > static_cast<uint64_t>(end - at)) {
            fail(SPEC_ERR_SNAPSHOT_CORRUPT, "a part of the snapshot reaches beyond its end");
        }
        const uint8_t * start = at;
        at += n;
        return start;
    }

    template <typename T> void value(T & x) { std::memcpy(&x, take(sizeof x), sizeof x); }

    void value(bool & x) {
        uint8_t byte = 0;
        value(byte);
        x = byte != 0; // other bytes are no bool
    }

    template <typename T> void array(T & items) {
        using item = typename T::value_type;
        uint64_t n = 0;
        value(n);
        if (n > static_cast<uint64_t>(end - at) / sizeof(item)) {
            fail(SPEC_ERR_SNAPSHOT_CORRUPT, "a part of the snapshot reaches beyond its end");
        }
        items.resize(static_cast<size_t>(n));
        if (n > 0) {
            std::memcpy(&items[0], take(n * sizeof(item)), static_cast<size_t>(n) * sizeof(item));
        }
    }
};

template <typename Archive, typename Params> void visit_params(Archive & io, Params & p) {
#define XX(name, otherwise, check, low, high, theirs) io.value(p.name);
    SAMPLER_FIELDS(XX, XX)
#undef XX
}

void write_source(snapshot_writer & out, const sampler_source & source) {
    visit_params(out, source.params);
    out.array(source.grammar);
    out.array(source.bias);
    out.array(source.samplers);
    for (const std::string & text : source.breakers) {
        out.array(text);
    }
}

sampler_source read_source(snapshot_reader & in) {
    sampler_source source;
    visit_params(in, source.params);
    in.array(source.grammar);
    in.array(source.bias);
    in.array(source.samplers);
    check_range("n_samplers", source.params.n_samplers, -1, 64);
    if (static_cast<int32_t>(source.samplers.size()) != std::max(source.params.n_samplers, 0)) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the list of samplers has another length than it says");
    }
    check_range("n_dry_breakers", source.params.n_dry_breakers, -1, DRY_BREAKERS_MAX);
    for (int32_t i = 0; i < source.params.n_dry_breakers; ++i) {
        source.breakers.emplace_back();
        in.array(source.breakers.back());
    }
    return source;
}

// Whether the next draft of a sequence depends on more than its cells.
bool has_drafter_state(const spec_engine & engine) {
    return engine.spec && !drafts_blocks(engine.limits.draft_type);
}

template <typename Archive, typename Sequence> void visit_sequence(Archive & io, Sequence & seq) {
    io.value(seq.is_cold);
    io.value(seq.is_warming_up);
    io.value(seq.has_emitted);
    io.value(seq.has_drafter_begun);
    io.value(seq.n_prompt);
    io.value(seq.id_last);
    io.array(seq.tokens);
    io.array(seq.heard);
    io.value(seq.n_heard);
    io.array(seq.known);
    io.array(seq.ngram_events);
}

// What a sampler's parameters and tokens do not tell: its random generators and adaptive terms.
std::string write_sampler_state(const spec_sampler & sampler) {
    std::ostringstream rng;
    rng.exceptions(std::ios::badbit); // where memory runs out it would write less, and say nothing
    rng.imbue(std::locale::classic());
    write_rng(rng, sampler.rng);
    std::string rest;
    if (!get_sampler_state(sampler.samplers(), rest)) {
        fail(SPEC_ERR_UNSUPPORTED, "the sequence's sampler has a state that cannot be written");
    }
    return rng.str() + rest;
}

// What is left of a sequence without its sampler: nothing that tells what was asked for. An n-gram
// drafter begins anew, since what it has learnt are drafts.
sequence without_sampler(const spec_engine & engine, const sequence & seq) {
    sequence bare;
    bare.is_cold = seq.is_cold;
    bare.is_warming_up = seq.is_warming_up;
    bare.has_drafter_begun = seq.has_drafter_begun && !engine.is_ngram();
    bare.tokens = seq.tokens;
    return bare;
}

// All of a snapshot between the header and the cells.
std::string write_parts(spec_engine & engine, const sequence & seq, int32_t seq_id,
                        bool has_sampler) {
    snapshot_writer out;
    if (has_sampler) {
        visit_sequence(out, seq);
        write_source(out, seq.sampler->source);
        out.array(write_sampler_state(*seq.sampler));
    } else {
        const sequence bare = without_sampler(engine, seq);
        visit_sequence(out, bare);
    }
    std::string state;
    if (has_drafter_state(engine) &&
        !common_speculative_seq_save(engine.spec.get(), seq_id, state)) {
        fail(SPEC_ERR_UNSUPPORTED, "the drafter's state cannot be written");
    }
    if (!has_sampler) {
        state.resize(std::min(state.size(), drafter_row_bytes(engine))); // no temperature, no seed
    }
    out.array(state);
    return std::move(out.bytes);
}

// Writes a context's cells of a sequence behind their size and returns the place after them.
uint8_t * write_cells(llama_context * ctx, int32_t seq_id, uint8_t * at, uint64_t n) {
    std::memcpy(at, &n, sizeof n);
    at += sizeof n;
    if (n > 0 && llama_state_seq_get_data_ext(ctx, at, n, seq_id, 0) != n) {
        fail(SPEC_ERR_INTERNAL, "llama.cpp wrote fewer cells than it announced" + llama_reason());
    }
    return at + n;
}

} // namespace

void save_sequence(spec_engine & engine, int32_t seq_id, bool has_sampler, uint8_t * buf,
                   size_t cap, size_t & n_needed) {
    const sequence & seq = begun(engine, seq_id);
    if (seq.is_proposed) {
        bad_plan(seq_id, "a proposal is pending; accept it first");
    }
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "its last batch has not been processed");
    }
    drop_copies(engine);
    forget_llama_reason();
    snapshot_header header = header_of(engine);
    header.has_sampler = has_sampler ? 1 : 0;
    const std::string parts = write_parts(engine, seq, seq_id, has_sampler);
    const bool has_draft = has_draft_cells(engine);
    const uint64_t n_target = llama_state_seq_get_size_ext(engine.target.get(), seq_id, 0);
    const uint64_t n_draft =
        has_draft ? llama_state_seq_get_size_ext(engine.draft.get(), seq_id, 0) : 0;
    if (n_target == 0 || (has_draft && n_draft == 0)) { // an empty sequence has a size, too
        fail(SPEC_ERR_INTERNAL, "llama.cpp does not tell the size of its cells" + llama_reason());
    }
    n_needed =
        sizeof header + parts.size() + 2 * sizeof(uint64_t) + n_target + n_draft + CHECKSUM_BYTES;
    if (buf == nullptr || cap < n_needed) {
        fail(SPEC_ERR_BUFFER_TOO_SMALL, "the snapshot has " + std::to_string(n_needed) + " bytes");
    }
    header.n_bytes = n_needed;
    header.tag = seq.tag;
    std::memcpy(buf, &header, sizeof header);
    std::memcpy(buf + sizeof header, parts.data(), parts.size());
    uint8_t * at = buf + sizeof header + parts.size();
    at = write_cells(engine.target.get(), seq_id, at, n_target);
    at = write_cells(engine.draft.get(), seq_id, at, n_draft);
    const uint64_t checksum = digest(0, buf, n_needed - CHECKSUM_BYTES);
    std::memcpy(at, &checksum, sizeof checksum);
}

namespace {

void check_whole(const uint8_t * buf, size_t n) {
    snapshot_header found;
    if (n < sizeof found + CHECKSUM_BYTES) {
        fail(SPEC_ERR_SNAPSHOT_TRUNCATED,
             "the snapshot has " + std::to_string(n) + " bytes, fewer than any snapshot");
    }
    std::memcpy(&found, buf, sizeof found);
    if (std::memcmp(found.magic, SNAPSHOT_MAGIC, sizeof found.magic) != 0) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "these bytes are no snapshot");
    }
    if (found.format != SNAPSHOT_FORMAT) {
        fail(SPEC_ERR_SNAPSHOT_VERSION, "the snapshot has format " + std::to_string(found.format) +
                                            "; expected " + std::to_string(SNAPSHOT_FORMAT));
    }
    if (found.n_bytes > n) {
        fail(SPEC_ERR_SNAPSHOT_TRUNCATED, "the snapshot has " + std::to_string(n) + " bytes of " +
                                              std::to_string(found.n_bytes));
    }
    uint64_t checksum = 0;
    std::memcpy(&checksum, buf + n - CHECKSUM_BYTES, sizeof checksum);
    if (found.n_bytes != n || checksum != digest(0, buf, n - CHECKSUM_BYTES)) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the snapshot's checksum or size is wrong");
    }
}

template <typename T> void check_same(const char * name, T found, T wanted) {
    if (found != wanted) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_CONFIG, std::string(name) + " is " + std::to_string(found) +
                                                 " in the snapshot, " + std::to_string(wanted) +
                                                 " in this engine");
    }
}

// Settings of which no cell of the other kind can be read.
void check_settings(const snapshot_header & found, const snapshot_header & wanted) {
    constexpr const char * TYPES[4] = {"cache_type_k", "cache_type_v", "cache_type_k_draft",
                                       "cache_type_v_draft"};
    const auto type_name = [](int64_t type) {
        return std::string(type < 0 || type >= GGML_TYPE_COUNT
                               ? "none"
                               : ggml_type_name(static_cast<ggml_type>(type)));
    };
    for (int i = 0; i < 4; ++i) {
        if (found.types[i] != wanted.types[i]) {
            fail(SPEC_ERR_SNAPSHOT_OTHER_CONFIG,
                 std::string(TYPES[i]) + " is " + type_name(found.types[i]) + " in the snapshot, " +
                     type_name(wanted.types[i]) + " in this engine");
        }
    }
    check_same("swa_full", found.is_swa_full, wanted.is_swa_full);
    check_same("rope_scaling", found.rope_scaling, wanted.rope_scaling);
    check_same("yarn_orig_ctx", found.yarn_orig_ctx, wanted.yarn_orig_ctx);
    int i = 0;
    for (const auto & [name, value] : rope_setting{}.numbers()) {
        check_same(name, found.rope[i], wanted.rope[i]);
        ++i;
    }
}

void check_binding(const snapshot_header & found, const snapshot_header & wanted) {
    if (found.llama_version != wanted.llama_version) {
        fail(SPEC_ERR_SNAPSHOT_VERSION, "the snapshot was written with another llama.cpp");
    }
    check_same("draft_type", found.draft_type, wanted.draft_type);
    if (found.target != wanted.target) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_MODEL, "the snapshot belongs to another target model");
    }
    if (found.draft != wanted.draft) {
        fail(SPEC_ERR_SNAPSHOT_OTHER_MODEL, "the snapshot belongs to another draft model");
    }
    check_same("n_ctx_seq", found.n_ctx_seq, wanted.n_ctx_seq);
    check_same("n_draft_max", found.n_draft_max, wanted.n_draft_max);
    check_same("n_rs_seq", found.n_rs_seq, wanted.n_rs_seq);
    check_same("the number of separate KV caches", found.n_streams, wanted.n_streams);
    check_same("flash_attention", found.flash_attention, wanted.flash_attention);
    check_same("probabilistic", found.probabilistic, wanted.probabilistic);
    check_same("n_min", found.n_min, wanted.n_min);
    check_same("p_min", found.p_min, wanted.p_min);
    check_settings(found, wanted);
}

[[noreturn]] void corrupt(const std::string & what) {
    fail(SPEC_ERR_SNAPSHOT_CORRUPT, "the snapshot contradicts itself: " + what);
}

void check_parts(const spec_engine & engine, const sequence & seq) {
    const int32_t n_vocab = engine.limits.n_vocab;
    const auto is_token = [&](int32_t x) { return x >= 0 && x < n_vocab; };
    if (seq.tokens.size() > static_cast<size_t>(engine.limits.n_ctx_seq)) {
        corrupt("it has more tokens than its context");
    }
    if (!std::all_of(seq.tokens.begin(), seq.tokens.end(), is_token) ||
        !std::all_of(seq.heard.begin(), seq.heard.end(),
                     [&](int32_t x) { return is_token(x < 0 ? -1 - x : x); }) ||
        (seq.id_last != LLAMA_TOKEN_NULL && !is_token(seq.id_last)) ||
        (seq.has_emitted && seq.id_last == LLAMA_TOKEN_NULL)) {
        corrupt("a token is out of range");
    }
    if (seq.is_warming_up && !seq.is_cold) {
        corrupt("it awaits a draft state that it has");
    }
    const int32_t n_tokens_known = static_cast<int32_t>(seq.known.size());
    if (!std::all_of(seq.known.begin(), seq.known.end(), is_token) || seq.n_heard < 0 ||
        seq.n_heard > engine.limits.n_ctx_seq + 1 ||
        (n_tokens_known > seq.n_past() ? n_tokens_known != seq.n_heard
                                       : seq.n_heard > seq.n_past() + 1)) {
        corrupt("what its sampler knows is out of range");
    }
    int32_t n_before = 0;
    for (const ngram_event & e : seq.ngram_events) {
        if (!engine.is_ngram() || e.n_past < n_before || e.n_past > seq.n_past() ||
            !is_token(e.id_last) || is_too_short_to_draft(engine, e.n_past) || e.n_draft < 1 ||
            e.n_draft > engine.limits.n_draft_max || e.n_accepted < -1 ||
            e.n_accepted > e.n_draft) {
            corrupt("a draft is out of range");
        }
        n_before = e.n_past;
    }
}

// Feeds a new sampler what the old one was fed.
void replay_sampler(const sequence & seq) {
    spec_sampler & sampler = *seq.sampler;
    for (const int32_t x : seq.heard) {
        const llama_token token = x < 0 ? -1 - x : x;
        if (x < 0 && sampler.grammar && !sampler.grammar->allows(token)) {
            corrupt("its tokens do not follow its grammar");
        }
        sampler.accept(token, x < 0);
    }
}

void read_sampler_state(spec_sampler & sampler, const std::string & state) {
    std::istringstream in(state);
    in.imbue(std::locale::classic());
    read_rng(in, sampler.rng);
    if (!in.good() ||
        !set_sampler_state(sampler.samplers(), state.substr(static_cast<size_t>(in.tellg())))) {
        corrupt("the sampler's random state does not fit its parameters");
    }
}

// Reads the sampler of a snapshot, and makes it only where it is the one that goes on: that
// compiles its grammar and feeds it all tokens.
void restore_sampler(const spec_engine & engine, snapshot_reader & in, sequence & seq,
                     bool is_wanted) {
    std::string state;
    try {
        const sampler_source source = read_source(in);
        in.array(state);
        if (!is_wanted) {
            return;
        }
        std::vector<const char *> pointers;
        seq.sampler.reset(make_sampler(*engine.target_model, source.view(pointers)));
        replay_sampler(seq);
    } catch (const failure & e) {
        corrupt(e.what()); // parameters that no sampler can have
    }
    read_sampler_state(*seq.sampler, state);
}

// The row that a drafter goes on from. A draft from another position would fail the drafts of all
// sequences in that batch; one that is not finite breaks the order that sorting relies on.
void check_drafter_state(const spec_engine & engine, const sequence & seq,
                         const std::string & state) {
    const bool is_eagle3 = engine.limits.draft_type == SPEC_DRAFT_EAGLE3;
    if (!is_eagle3 && engine.limits.draft_type != SPEC_DRAFT_MTP) {
        return; // no row
    }
    const llama_model * model = llama_get_model(engine.draft.get());
    const int32_t width = is_eagle3 ? llama_model_n_embd(model) : llama_model_n_embd_out(model);
    llama_pos pos = -1;
    const size_t n_pos = is_eagle3 ? sizeof pos : 0;
    std::vector<float> row(static_cast<size_t>(width));
    const size_t n_row = row.size() * sizeof(float);
    if (state.size() < n_pos + n_row) {
        corrupt("the drafter's state has another size");
    }
    std::memcpy(&pos, state.data(), n_pos);
    std::memcpy(row.data(), state.data() + n_pos, n_row);
    if (pos < -1 || pos >= seq.n_past() ||
        !std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); })) {
        corrupt("the drafter's state is out of range");
    }
}

bool has_sampler(const snapshot_header & found) {
    if (found.has_sampler > 1) {
        corrupt("it neither has a sampler nor has none");
    }
    return found.has_sampler == 1;
}

// Without a sampler a sequence has chosen nothing, and knows nothing but its tokens.
void check_bare(const sequence & seq) {
    if (seq.has_emitted || seq.id_last != LLAMA_TOKEN_NULL || seq.n_prompt != 0 ||
        seq.n_heard != 0 || !seq.heard.empty() || !seq.known.empty() || !seq.ngram_events.empty()) {
        corrupt("it tells what a sampler did, and has none");
    }
}

} // namespace

// Everything that can be wrong with a snapshot and shows without touching the contexts. The parts
// have a sampler where one is wanted and the snapshot has one.
snapshot_parts read_snapshot(const spec_engine & engine, const uint8_t * buf, size_t n,
                             bool wants_sampler) {
    check_whole(buf, n);
    snapshot_header found;
    std::memcpy(&found, buf, sizeof found);
    check_binding(found, header_of(engine));
    snapshot_reader in{buf + sizeof found, buf + n - CHECKSUM_BYTES};
    snapshot_parts parts;
    visit_sequence(in, parts.seq);
    parts.seq.tag = found.tag;
    check_parts(engine, parts.seq);
    if (has_sampler(found)) {
        restore_sampler(engine, in, parts.seq, wants_sampler);
    } else {
        check_bare(parts.seq);
    }
    in.array(parts.drafter_state);
    check_drafter_state(engine, parts.seq, parts.drafter_state);
    in.value(parts.n_target);
    parts.target = in.take(parts.n_target);
    in.value(parts.n_draft);
    parts.draft = in.take(parts.n_draft);
    if (in.at != in.end || (parts.n_draft > 0) != has_draft_cells(engine)) {
        corrupt("its parts do not fill it");
    }
    return parts;
}

namespace {

// Lets a new n-gram drafter live through the drafts of the old one.
void replay_ngram(spec_engine & engine, sequence & seq, int32_t seq_id) {
    const std::vector<ngram_event> events = std::move(seq.ngram_events);
    const llama_tokens all = std::move(seq.tokens);
    seq.ngram_events.clear();
    seq.tokens.clear();
    seq.has_drafter_begun = false;
    for (const ngram_event & e : events) {
        seq.tokens.insert(seq.tokens.end(), all.begin() + seq.n_past(), all.begin() + e.n_past);
        arm(engine, seq, seq_id, e.n_draft, e.id_last);
        common_speculative_draft(seq.ngram.get());
        if (e.n_accepted > static_cast<int32_t>(seq.draft.tokens.size()) ||
            (e.n_accepted >= 0 && seq.draft.tokens.empty())) {
            corrupt("more tokens were accepted than were drafted");
        }
        if (e.n_accepted >= 0) {
            accept_draft(engine, seq, seq_id, e.n_accepted);
        }
    }
    seq.draft = {};
    seq.tokens = all;
}

void restore_cells(llama_context * ctx, int32_t seq_id, const uint8_t * cells, uint64_t n,
                   int32_t n_past) {
    if (llama_state_seq_set_data_ext(ctx, cells, n, seq_id, 0) != n ||
        llama_memory_seq_pos_max(llama_get_memory(ctx), seq_id) >= n_past) {
        fail(SPEC_ERR_SNAPSHOT_CORRUPT, "llama.cpp refuses the snapshot's cells" + llama_reason());
    }
}

void restore_sequence(spec_engine & engine, int32_t seq_id, snapshot_parts & parts) {
    sequence & seq = at(engine, seq_id);
    const int32_t n_past = parts.seq.n_past();
    drop_copies(engine);
    restore_cells(engine.target.get(), seq_id, parts.target, parts.n_target, n_past);
    if (llama_memory_seq_pos_max(engine.target_memory(), seq_id) != n_past - 1) {
        corrupt("it has other cells than tokens");
    }
    if (parts.draft != nullptr && parts.n_draft > 0) {
        restore_cells(engine.draft.get(), seq_id, parts.draft, parts.n_draft, n_past);
    }
    const bool has_begun = parts.seq.has_drafter_begun;
    seq = std::move(parts.seq);
    std::vector<ngram_event> events = std::move(seq.ngram_events);
    begin_drafter(engine, seq, seq_id);
    seq.ngram_events = std::move(events);
    if (seq.ngram) {
        replay_ngram(engine, seq, seq_id);
    }
    seq.has_drafter_begun = has_begun;
    if (has_drafter_state(engine) &&
        !common_speculative_seq_load(engine.spec.get(), seq_id, parts.drafter_state)) {
        corrupt("the drafter's state has another size");
    }
    seq.is_begun = true;
}

void check_cells(const spec_engine & engine, const sequence & seq) {
    const int64_t n_cells = cells_with(engine, seq.n_past());
    if (engine.limits.kv_unified && n_cells > engine.limits.n_ctx) {
        fail(SPEC_ERR_NO_ROOM,
             "the snapshot needs " + std::to_string(seq.n_past()) + " KV cells; " +
                 std::to_string(engine.limits.n_ctx - n_cells + seq.n_past()) + " are free");
    }
}

void load_sequence(spec_engine & engine, int32_t seq_id, const uint8_t * buf, size_t n) {
    if (at(engine, seq_id).is_begun) {
        fail(SPEC_ERR_SEQ_BUSY, "sequence " + std::to_string(seq_id) + " has begun already");
    }
    if (is_unprocessed(engine, seq_id)) {
        bad_plan(seq_id, "a batch with tokens of its former sequence has not been processed");
    }
    forget_llama_reason();
    snapshot_parts parts = read_snapshot(engine, buf, n, true);
    if (!parts.seq.sampler) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "the snapshot holds no sampler; start the sequence from it with one");
    }
    load_parts(engine, seq_id, parts);
}

} // namespace

// Takes an idle sequence into use with what was read. Without a sampler there, the caller gives it
// one before anything else is done with it.
void load_parts(spec_engine & engine, int32_t seq_id, snapshot_parts & parts) {
    forget_llama_reason();
    check_cells(engine, parts.seq);
    try {
        restore_sequence(engine, seq_id, parts);
    } catch (...) {
        clear_sequence(engine, seq_id);
        throw;
    }
}

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_engine_seq_save(spec_engine * engine, int32_t seq_id, void * buf, size_t cap,
                             size_t * n_needed) {
    return guarded([&] {
        deref(n_needed, "n_needed") = 0;
        save_sequence(deref(engine, "engine"), seq_id, true, static_cast<uint8_t *>(buf), cap,
                      *n_needed);
    });
}

int32_t spec_engine_seq_save_prefix(spec_engine * engine, int32_t seq_id, void * buf, size_t cap,
                                    size_t * n_needed) {
    return guarded([&] {
        deref(n_needed, "n_needed") = 0;
        save_sequence(deref(engine, "engine"), seq_id, false, static_cast<uint8_t *>(buf), cap,
                      *n_needed);
    });
}

int32_t spec_engine_seq_load(spec_engine * engine, int32_t seq_id, const void * buf, size_t n) {
    return guarded([&] {
        if (n > 0) {
            deref(static_cast<const uint8_t *>(buf), "buf");
        }
        load_sequence(deref(engine, "engine"), seq_id, static_cast<const uint8_t *>(buf), n);
    });
}

} // extern "C"

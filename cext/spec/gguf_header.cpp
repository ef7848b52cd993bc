// Checks of a GGUF file before llama.cpp loads it.

#include "internal.hpp"

#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <memory>
#include <string>
#include <system_error>
#include <unordered_map>
#include <vector>

namespace drafthouse {

namespace {

// A number of a GGUF header, or the default where it is absent or of another type.
uint32_t header_u32(const gguf_context * header, const std::string & key, uint32_t otherwise) {
    const int64_t id = gguf_find_key(header, key.c_str());
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_UINT32;
    return is_there ? gguf_get_val_u32(header, id) : otherwise;
}

uint16_t header_u16(const gguf_context * header, const char * key) {
    const int64_t id = gguf_find_key(header, key);
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_UINT16;
    return is_there ? gguf_get_val_u16(header, id) : 0;
}

// An array of a GGUF header, or -1 where it is absent or of another type.
int64_t header_array(const gguf_context * header, const char * key, gguf_type type) {
    const int64_t id = gguf_find_key(header, key);
    const bool is_array = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_ARRAY;
    return is_array && gguf_get_arr_type(header, id) == type ? id : -1;
}

std::string header_text(const gguf_context * header, const std::string & key) {
    const int64_t id = gguf_find_key(header, key.c_str());
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_STRING;
    return is_there ? gguf_get_val_str(header, id) : "";
}

bool ends_with(const std::string & text, const std::string & end) {
    return text.size() >= end.size() &&
           text.compare(text.size() - end.size(), end.size(), end) == 0;
}

bool is_scaling_factor(const std::string & key) {
    return ends_with(key, ".rope.scaling.factor") || ends_with(key, ".rope.scale_linear");
}

// Why a floating-point number of an architecture cannot be, or nullptr. llama.cpp's own saver
// writes the numbers of all architectures, and "no bound" is minus infinity.
const char * wrong_float(const std::string & key, float value) {
    if (ends_with(key, ".kda.gate_lower_bound") && value == -INFINITY) {
        return nullptr;
    }
    if (!std::isfinite(value)) {
        return "not a finite number";
    }
    if (ends_with(key, "epsilon") && value < 0.0f) {
        return "negative";
    }
    if (key.find(".rope.freq_base") != std::string::npos && value <= 0.0f) {
        return "not above 0";
    }
    // 0 is none, as llama.cpp's own saver writes it.
    if (is_scaling_factor(key) && value < 0.0f) {
        return "negative";
    }
    return nullptr;
}

// The reason why the numbers of a header make llama.cpp end the process or hang, or nullptr.
template <typename Number> const char * wrong_layers(const std::string & arch, Number && number) {
    constexpr uint32_t N_LAYERS_MAX = 512; // LLAMA_MAX_LAYERS
    const uint32_t n_layer = number(".block_count", 1);
    if (n_layer < 1 || n_layer > N_LAYERS_MAX) {
        return "block_count is not in [1, 512]";
    }
    if (number(".context_length", 1) > static_cast<uint32_t>(INT32_MAX)) {
        return "context_length is above 2147483647";
    }
    if (number(".nextn_predict_layers", 0) > n_layer) {
        return "nextn_predict_layers is above block_count";
    }
    if (number(".full_attention_interval", 1) == 0) {
        return "full_attention_interval is 0";
    }
    if (arch == "eagle3" && n_layer != 1) {
        return "block_count is not 1, as in every EAGLE-3 model";
    }
    return nullptr;
}

// Architectures whose graphs assert that the heads of keys and values are rotated whole, and those
// that assert no more than that both are equally wide. Read from llama.cpp's graphs;
// tests/cext/test_malformed_models.py compares.
const std::initializer_list<const char *> ROTATED_WHOLE = {
    "apertus",    "arcee",         "arctic",       "baichuan",       "chameleon",     "codeshell",
    "cogvlm",     "cohere2moe",    "dbrx",         "deci",           "deepseek",      "dots1",
    "dream",      "ernie4_5",      "ernie4_5-moe", "exaone",         "exaone-moe",    "exaone4",
    "falcon",     "granite",       "granite_swa",  "granitemoe",     "graniteswitch", "grok",
    "grovemoe",   "hunyuan-dense", "hunyuan-moe",  "hunyuan_vl",     "hy_v3",         "internlm2",
    "jais2",      "llada",         "llada-moe",    "llama",          "llama-embed",   "llama4",
    "maincoder",  "mellum",        "minicpm",      "mistral3",       "olmo",          "olmo2",
    "olmoe",      "orion",         "paddleocr",    "pangu-embedded", "plamo",         "pockettts",
    "qwen2",      "qwen2moe",      "qwen2vl",      "qwen3",          "qwen3moe",      "qwen3tts",
    "qwen3vl",    "qwen3vlmoe",    "rnd1",         "seed_oss",       "smallthinker",  "smollm3",
    "starcoder2", "talkie",        "xverse"};
const std::initializer_list<const char *> OF_EQUAL_WIDTHS = {
    "afmoe",        "bailingmoe2",  "bert",           "bitnet",   "bloom",         "chatglm",
    "clef",         "cohere2",      "command-r",      "dflash",   "eagle3",        "eurobert",
    "glm4",         "glm4moe",      "gpt2",           "gptneox",  "granitehybrid", "jais",
    "jina-bert-v2", "jina-bert-v3", "k2-horizon",     "laguna",   "maple",         "minimax-01",
    "minimax-m2",   "minimax-m3",   "modern-bert",    "mpt",      "muse-glimmer",  "nanbeige",
    "nemotron",     "nemotron_h",   "nemotron_h_moe", "neo-bert", "nomic-bert",    "nomic-bert-moe",
    "openelm",      "phi2",         "phi3",           "phimoe",   "qwen",          "qwen35",
    "qwen35moe",    "qwen3next",    "qwen4exp",       "refact",   "spark2_5",      "stablelm",
    "starcoder",    "t5",           "t5encoder"};

template <typename Number> const char * wrong_heads(const std::string & arch, Number && number) {
    const uint32_t n_head = number(".attention.head_count", 0);
    const uint32_t n_embd = number(".embedding_length", 0);
    const uint32_t width = number(".attention.key_length", n_head > 0 ? n_embd / n_head : 0);
    const uint32_t n_rot = number(".rope.dimension_count", width);
    const uint32_t n_head_kv = number(".attention.head_count_kv", n_head);
    if (n_head_kv > 0 && n_head % n_head_kv != 0) {
        return "attention.head_count_kv does not divide attention.head_count";
    }
    if (n_rot % 2 != 0 || (width > 0 && n_rot > width)) {
        return "rope.dimension_count is odd or above attention.key_length";
    }
    if (is_one_of(arch, ROTATED_WHOLE) && width > 0 && n_rot != width) {
        return "rope.dimension_count is not the width of a head";
    }
    const bool has_equal_widths =
        is_one_of(arch, ROTATED_WHOLE) || is_one_of(arch, OF_EQUAL_WIDTHS);
    if (has_equal_widths && number(".attention.value_length", width) != width) {
        return "attention.value_length is not attention.key_length";
    }
    return nullptr;
}

template <typename Number> const char * wrong_experts(const std::string &, Number && number) {
    const bool is_more = number(".expert_used_count", 0) > number(".expert_count", 0);
    return is_more ? "expert_used_count is above expert_count" : nullptr;
}

// What a DFlash model with hyper-connections divides by.
template <typename Number> const char * wrong_blocks(const std::string & arch, Number && number) {
    if (arch != "dflash" || number(".hyper_connection.count", 0) == 0) {
        return nullptr;
    }
    if (number(".attention.output_group_count", 0) == 0) {
        return "attention.output_group_count is missing or 0";
    }
    if (number(".attention.sliding_window", 0) == 0) {
        return "attention.sliding_window is missing or 0";
    }
    return nullptr;
}

template <typename Number> const char * wrong_states(const std::string & arch, Number && number) {
    constexpr uint32_t N_KERNEL_MAX = 64;
    if (!is_one_of(arch, {"qwen35", "qwen35moe", "qwen3next"})) {
        return nullptr;
    }
    const uint64_t n_heads = number(".ssm.time_step_rank", 1);
    const uint64_t n_groups = number(".ssm.group_count", 1);
    const uint64_t width = number(".ssm.state_size", 1);
    if (number(".ssm.inner_size", 1) != width * n_heads || width == 0) {
        return "ssm.inner_size is not ssm.state_size * ssm.time_step_rank";
    }
    if (n_groups == 0 || n_heads % n_groups != 0) {
        return "ssm.group_count does not divide ssm.time_step_rank";
    }
    const uint32_t n_kernel = number(".ssm.conv_kernel", 1);
    if (n_kernel < 1 || n_kernel > N_KERNEL_MAX) {
        return "ssm.conv_kernel is not in [1, 64]";
    }
    return nullptr;
}

const char * wrong_scaling(const gguf_context * header, const std::string & arch) {
    const int64_t id = gguf_find_key(header, (arch + ".rope.scaling.type").c_str());
    const bool is_there = id >= 0 && gguf_get_kv_type(header, id) == GGUF_TYPE_STRING;
    const bool is_known = !is_there || is_one_of(gguf_get_val_str(header, id),
                                                 {"none", "linear", "yarn", "longrope"});
    return is_known ? nullptr : "rope.scaling.type is not one of none, linear, yarn, longrope";
}

// Why llama.cpp ends the process when it loads the vocabulary, or an empty text.
std::string wrong_vocabulary(const gguf_context * header) {
    constexpr int32_t TYPE_BYTE = 6; // LLAMA_TOKEN_TYPE_BYTE
    const std::string kind = header_text(header, "tokenizer.ggml.model");
    const int64_t texts = header_array(header, "tokenizer.ggml.tokens", GGUF_TYPE_STRING);
    if (texts < 0 || is_one_of(kind, {"no_vocab", "none"})) {
        return "";
    }
    const int64_t types = header_array(header, "tokenizer.ggml.token_type", GGUF_TYPE_INT32);
    const size_t n_types = types < 0 || kind != "bert" ? 0 : gguf_get_arr_n(header, types);
    const size_t n = gguf_get_arr_n(header, texts);
    std::unordered_map<std::string, size_t> ids;
    ids.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        std::string text = gguf_get_arr_str(header, texts, i);
        if (text.empty()) {
            text = "[EMPTY_" + std::to_string(i) + "]"; // as llama.cpp names it
        }
        const auto [first, is_new] = ids.try_emplace(std::move(text), i);
        if (!is_new) {
            return "tokens " + std::to_string(first->second) + " and " + std::to_string(i) +
                   " have the same text; each needs one of its own (tokenizer.ggml.tokens)";
        }
        const auto * type =
            static_cast<const int32_t *>(i < n_types ? gguf_get_arr_data(header, types) : nullptr);
        if (type != nullptr && type[i] == TYPE_BYTE) {
            return "token " + std::to_string(i) +
                   " is a byte (tokenizer.ggml.token_type 6), which WordPiece vocabularies have "
                   "not (tokenizer.ggml.model bert)";
        }
    }
    return "";
}

// To open a pipe is to wait for whoever writes into it. What cannot be looked at cannot be read
// either, and is told of there.
void check_kind(const std::string & path) {
    std::error_code unknown;
    const auto kind = std::filesystem::status(path, unknown).type();
    const bool is_pipe = kind == std::filesystem::file_type::fifo;
    if (is_pipe || kind == std::filesystem::file_type::directory) {
        fail(SPEC_ERR_BAD_MODEL,
             path + " is a " + (is_pipe ? "pipe" : "directory") + ", and not a GGUF file");
    }
}

using Header = std::unique_ptr<gguf_context, decltype(&gguf_free)>;

Header read_header(const std::string & path) {
    return Header(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr}),
                  gguf_free);
}

// Of a part that is cut short llama.cpp names a tensor alone, and not which file to bring again.
void check_whole(const gguf_context * header, const std::string & path) {
    // Of one that cannot be read llama.cpp names the file; one without tensors may end unpadded.
    if (header == nullptr || gguf_get_n_tensors(header) == 0) {
        return;
    }
    uint64_t end = 0;
    for (int64_t i = 0; i < gguf_get_n_tensors(header); ++i) {
        const uint64_t begin = gguf_get_tensor_offset(header, i);
        end = std::max(end, begin + gguf_get_tensor_size(header, i));
    }
    end += gguf_get_data_offset(header);
    std::error_code unknown;
    const uint64_t n_bytes = std::filesystem::file_size(path, unknown);
    if (!unknown && n_bytes < end) {
        fail(SPEC_ERR_BAD_MODEL, path + " is cut short: it has " + std::to_string(n_bytes) +
                                     " bytes of " + std::to_string(end));
    }
}

// A model in several files is given by the first of them, and all are there.
void check_parts(const gguf_context * header, const std::string & path) {
    const int32_t n_parts = header_u16(header, "split.count");
    const int32_t i_part = header_u16(header, "split.no");
    std::vector<char> prefix(path.size() + 1);
    if (n_parts < 2) {
        return;
    }
    if (llama_split_prefix(prefix.data(), prefix.size(), path.c_str(), i_part, n_parts) <= 0) {
        fail(SPEC_ERR_NOT_FOUND, path + " is part " + std::to_string(i_part + 1) +
                                     " of a model in " + std::to_string(n_parts) +
                                     " files, and is not named so: the others are found by its "
                                     "name, as in model-00001-of-00002.gguf (links may be)");
    }
    std::vector<char> part(path.size() + 32);
    const auto name_of = [&](int32_t i) {
        llama_split_path(part.data(), part.size(), prefix.data(), i, n_parts);
        return std::string(part.data());
    };
    const std::string n_files = std::to_string(n_parts) + " files";
    if (i_part != 0) {
        fail(SPEC_ERR_UNSUPPORTED, path + " is part " + std::to_string(i_part + 1) +
                                       " of a model in " + n_files +
                                       ", which is given by its first part: " + name_of(0));
    }
    for (int32_t i = 1; i < n_parts; ++i) {
        check_kind(name_of(i));
        if (!std::ifstream(name_of(i), std::ios::binary)) {
            fail(SPEC_ERR_NOT_FOUND, path + " is the first part of a model in " + n_files +
                                         "; cannot read " + name_of(i));
        }
    }
    check_whole(header, path);
    for (int32_t i = 1; i < n_parts; ++i) {
        check_whole(read_header(name_of(i)).get(), name_of(i));
    }
}

} // namespace

void check_gguf_magic(const std::string & path) {
    check_kind(path);
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        fail(SPEC_ERR_NOT_FOUND, "cannot read " + path);
    }
    char magic[4] = {};
    file.read(magic, sizeof magic);
    if (file.gcount() != sizeof magic || std::memcmp(magic, "GGUF", sizeof magic) != 0) {
        fail(SPEC_ERR_BAD_MODEL,
             path + " is not a GGUF file: it does not begin with the bytes \"GGUF\"");
    }
}

bool is_one_of(const std::string & name, std::initializer_list<const char *> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

// Refuses numbers on which llama.cpp ends the process instead of refusing them itself: found by
// tests/proofs/malformed.py.
void check_header(const std::string & path) {
    const Header header = read_header(path);
    if (header) {
        check_parts(header.get(), path);
    }
    const std::string arch = header ? header_text(header.get(), "general.architecture") : "";
    if (arch.empty()) {
        return; // the loader says what is wrong
    }
    const auto number = [&](const char * name, uint32_t otherwise) {
        return header_u32(header.get(), arch + name, otherwise);
    };
    for (const char * reason : {wrong_layers(arch, number), wrong_heads(arch, number),
                                wrong_states(arch, number), wrong_blocks(arch, number),
                                wrong_experts(arch, number), wrong_scaling(header.get(), arch)}) {
        if (reason != nullptr) {
            fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + arch + "." + reason);
        }
    }
    if (const std::string reason = wrong_vocabulary(header.get()); !reason.empty()) {
        fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + reason);
    }
    if (number(".nextn_predict_layers", 0) == number(".block_count", 1)) {
        fail(SPEC_ERR_UNSUPPORTED,
             path + " holds MTP layers alone (" + arch +
                 "), which draft inside another model; only models that bring their MTP layers in "
                 "their own file are supported. Give the target's file with its MTP layers, or "
                 "another kind of draft");
    }
    for (int64_t i = 0; i < gguf_get_n_kv(header.get()); ++i) {
        const std::string key = gguf_get_key(header.get(), i);
        const bool is_float = gguf_get_kv_type(header.get(), i) == GGUF_TYPE_FLOAT32;
        const char * reason = is_float && key.rfind(arch + ".", 0) == 0
                                  ? wrong_float(key, gguf_get_val_f32(header.get(), i))
                                  : nullptr;
        if (reason != nullptr) {
            fail(SPEC_ERR_BAD_MODEL, path + " is damaged: " + key + " is " + reason);
        }
    }
}

} // namespace drafthouse

// Chat templates.

#include "internal.hpp"

#include "chat.h"

#include <algorithm>
#include <cctype>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// A chat template, and what the tokenizer adds to its texts.
struct spec_chat {
    common_chat_templates_ptr templates;
    std::string bos;
    std::string eos;
    bool add_bos = false;
    bool add_eos = false;

    // Where a text begins and ends without the tokens that the tokenizer adds itself.
    std::pair<size_t, size_t> without_added(const std::string & text) const {
        const size_t begin = add_bos && text.compare(0, bos.size(), bos) == 0 ? bos.size() : 0;
        const bool has_eos = add_eos && text.size() - begin >= eos.size() &&
                             text.compare(text.size() - eos.size(), eos.size(), eos) == 0;
        return {begin, text.size() - (has_eos ? eos.size() : 0)};
    }
};

namespace drafthouse {

namespace {

[[noreturn]] void bad_template(const char * why) {
    fail(SPEC_ERR_BAD_TEMPLATE, std::string("the chat template ") + why);
}

// Whether a tag such as {% set x = 1 %} sets what follows a sign; else {% endset %} ends it.
bool is_assignment(const std::string & rest) {
    const size_t sign = rest.find('=');
    if (sign == std::string::npos || rest.compare(sign, 2, "==") == 0) {
        return false;
    }
    int n_brackets = 0; // within them the sign belongs to an argument
    for (size_t i = 0; i < sign; ++i) {
        const auto c = static_cast<unsigned char>(rest[i]);
        n_brackets += c == '(' || c == '[' ? 1 : c == ')' || c == ']' ? -1 : 0;
        if (std::isalnum(c) == 0 && std::isspace(c) == 0 && std::strchr("_.,()[]", c) == nullptr) {
            return false;
        }
    }
    return n_brackets == 0;
}

// Change of the depth of blocks by a tag such as {% if … %} or {% endfor %}. What llama.cpp does
// not take for a tag ends its parse, so it may count as anything.
int block_step(const std::string & tag) {
    const auto is_letter = [](unsigned char c) {
        return c == '_' || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    };
    const auto begin = std::find_if(tag.begin(), tag.end(), is_letter);
    const auto end = std::find_if_not(begin, tag.end(), is_letter);
    const std::string word(begin, end);
    const std::string rest(end, tag.end());
    if (is_one_of(word, {"generation", "endgeneration"})) {
        // llama.cpp goes over them, and over whatever comes next, be it the end of the tag or not.
        if (rest.find_first_not_of("- \t\r\n") != std::string::npos) {
            bad_template("has a tag {% generation %} with more in it than this word");
        }
        return 0;
    }
    if (word == "set") {
        return is_assignment(rest) ? 0 : 1;
    }
    if (word.rfind("end", 0) == 0) {
        return -1;
    }
    return is_one_of(word, {"if", "for", "macro", "call", "filter"}) ? 1 : 0;
}

// Where a tag {{ or {% ends whose text begins at `begin`; its length and brackets are bounded.
size_t end_of_tag(const std::string & text, size_t begin, char kind) {
    constexpr size_t N_TAG_MAX = 8 << 10; // bytes: bounds chains of operators too
    constexpr int N_BRACKETS_MAX = 128;
    const char closing = kind == '%' ? '%' : '}';
    int n_brackets = 0;
    char quote = '\0';
    size_t at = begin;
    for (; at < text.size(); ++at) {
        const char c = text[at];
        if (quote != '\0') {
            at += c == '\\' ? 1 : 0;
            quote = c == quote ? '\0' : quote;
        } else if (c == '\'' || c == '"') {
            quote = c;
        } else if (c == closing && text.compare(at + 1, 1, "}") == 0 &&
                   (kind == '%' || n_brackets <= 0)) {
            break;
        } else if (c == '(' || c == '[' || c == '{') {
            n_brackets += 1;
        } else if (c == ')' || c == ']' || c == '}') {
            n_brackets -= 1;
        }
        if (n_brackets > N_BRACKETS_MAX) {
            bad_template("nests more than 128 brackets");
        }
        if (at - begin > N_TAG_MAX) {
            bad_template("has a tag longer than 8 KiB");
        }
    }
    return std::min(at, text.size());
}

// llama.cpp parses a template by recursion without a bound and dies of a full stack, so its nesting
// is bounded here. What it does when it runs is bounded from outside (chat_process.py).
void check_template(const std::string & text) {
    constexpr size_t N_BYTES_MAX = 1 << 20;
    constexpr int N_BLOCKS_MAX = 128;
    constexpr int N_ELIF_MAX = 1024;
    if (text.size() > N_BYTES_MAX) {
        bad_template("is longer than 1 MiB");
    }
    int n_blocks = 0;
    int n_elif = 0;
    size_t at = 0;
    while ((at = text.find('{', at)) != std::string::npos) {
        const char kind = at + 1 < text.size() ? text[at + 1] : '\0';
        const size_t begin = at + 2;
        if (kind == '#') {
            at = std::min(text.find("#}", begin), text.size());
        } else if (kind == '{') {
            at = end_of_tag(text, begin, kind);
        } else if (kind == '%') {
            at = end_of_tag(text, begin, kind);
            const std::string tag = text.substr(begin, at - begin);
            n_blocks = std::max(n_blocks + block_step(tag), 0);
            n_elif += tag.find("elif") != std::string::npos ? 1 : 0; // each a level deeper
        } else {
            ++at;
        }
        if (n_blocks > N_BLOCKS_MAX || n_elif > N_ELIF_MAX) {
            bad_template("nests more than 128 blocks, or has more than 1024 times elif");
        }
    }
}

// llama.cpp's words about a template as one line: the place in its source that they show is left
// out, its number stays.
std::string in_one_line(const std::string & words) {
    const std::string mark = "\nError: ", place = " at line ", source = " in source:";
    std::string line = words.substr(0, words.find('\n'));
    if (const size_t at = words.rfind(mark); at != std::string::npos) {
        const size_t begin = words.find(place);
        const size_t end = words.find(source, begin);
        line = words.substr(at + mark.size());
        if (end != std::string::npos) {
            line = words.substr(begin + 1, end - begin - 1) + ": " + line;
        }
    }
    std::replace(line.begin(), line.end(), '\n', ' ');
    return line;
}

// What a template throws becomes BAD_TEMPLATE.
template <typename Body> auto run_template(const Body & body) {
    try {
        return body();
    } catch (const failure &) {
        throw;
    } catch (const std::exception & e) {
        fail(SPEC_ERR_BAD_TEMPLATE, "the chat template failed: " + in_one_line(e.what()));
    }
}

std::unique_ptr<spec_chat> open_chat(const spec_chat_params & params) {
    auto chat = std::make_unique<spec_chat>();
    const std::string source = &deref(params.source, "source");
    chat->bos = &deref(params.bos, "bos");
    chat->eos = &deref(params.eos, "eos");
    chat->add_bos = params.add_bos;
    chat->add_eos = params.add_eos;
    if (source.empty()) { // llama.cpp asserts that it has a model then
        fail(SPEC_ERR_INVALID_ARGUMENT, "the chat template is empty");
    }
    check_template(source);
    chat->templates = run_template([&] {
        try {
            return common_chat_templates_init(nullptr, source, chat->bos, chat->eos);
        } catch (const std::exception &) {
            common_chat_template(source, chat->bos, chat->eos); // throws the same, with its words
            throw;
        }
    });
    return chat;
}

// The spans of a prompt that messages brought: of the rendering that became the prompt. None where
// llama.cpp has made the prompt of more than one.
std::vector<spec_span> find_input(const std::string & prompt,
                                  const std::vector<common_chat_text_parts> & renderings) {
    for (const common_chat_text_parts & parts : renderings) {
        std::vector<spec_span> spans;
        size_t at = 0;
        bool is_same = true;
        for (const common_chat_text_part & part : parts) {
            is_same = is_same && prompt.compare(at, part.text.size(), part.text) == 0;
            if (!is_same) {
                break;
            }
            if (part.is_input && !part.text.empty()) {
                spans.push_back({at, at + part.text.size()});
            }
            at += part.text.size();
        }
        if (is_same && at == prompt.size()) {
            return spans;
        }
    }
    return {};
}

// A chat in a template's format.
struct formatted {
    std::string text;
    std::vector<spec_span> input; // what messages brought, in order and apart
};

// Cuts a text to [begin, end), and its spans with it.
formatted cut(const std::string & text, const std::vector<spec_span> & spans, size_t begin,
              size_t end) {
    formatted result{text.substr(begin, end - begin), {}};
    for (const spec_span & span : spans) {
        const size_t first = std::max(span.begin, begin);
        const size_t last = std::min(span.end, end);
        if (first < last) {
            result.input.push_back({first - begin, last - begin});
        }
    }
    return result;
}

// Levels of brackets in a text of JSON, those in its strings apart.
int depth_of(const char * json) {
    int depth = 0;
    int deepest = 0;
    bool is_string = false;
    for (const char * at = json; *at != '\0'; ++at) {
        if (is_string && *at == '\\' && at[1] != '\0') {
            ++at;
        } else if (*at == '"') {
            is_string = !is_string;
        } else if (!is_string) {
            depth += *at == '[' || *at == '{' ? 1 : *at == ']' || *at == '}' ? -1 : 0;
            deepest = std::max(deepest, depth);
        }
    }
    return deepest;
}

// Sets what a template finds under names of its own.
void set_arguments(common_chat_templates_inputs & inputs, const char * const * names,
                   const char * const * values, size_t n) {
    constexpr int N_LEVELS_MAX = 64; // llama.cpp goes into them by recursion
    for (size_t i = 0; i < n; ++i) {
        const std::string name = &deref((&deref(names, "names"))[i], "name");
        const char * value = &deref((&deref(values, "values"))[i], "value");
        if (is_one_of(name,
                      {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "no argument of a chat template is called " + name);
        }
        if (depth_of(value) > N_LEVELS_MAX) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "the argument " + name + " nests more than 64 levels");
        }
        inputs.chat_template_kwargs[name] = value;
        if (name == "enable_thinking") { // what llama.cpp itself adds for thoughts
            inputs.enable_thinking = inputs.chat_template_kwargs[name] == "true";
        }
    }
}

formatted format_chat(const spec_chat & chat, const char * const * roles,
                      const char * const * contents, size_t n, const char * const * names,
                      const char * const * values, size_t n_arguments, bool add_generation_prompt) {
    if (n == 0) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "there are no messages");
    }
    deref(roles, "roles");
    deref(contents, "contents");
    std::vector<common_chat_text_parts> renderings;
    common_chat_templates_inputs inputs;
    inputs.renderings = &renderings;
    inputs.add_generation_prompt = add_generation_prompt;
    inputs.use_jinja = true;
    for (size_t i = 0; i < n; ++i) {
        common_chat_msg message;
        message.role = &deref(roles[i], "role");
        message.content = &deref(contents[i], "content");
        inputs.messages.push_back(std::move(message));
    }
    set_arguments(inputs, names, values, n_arguments);
    const auto prompt = [&] {
        return common_chat_templates_apply(chat.templates.get(), inputs).prompt;
    };
    return run_template([&] {
        std::string text;
        try {
            text = prompt();
        } catch (const std::exception &) { // perhaps of the parser of answers, which we need not
            renderings.clear();
            inputs.force_pure_content = true;
            text = prompt();
        }
        const auto [begin, end] = chat.without_added(text);
        return cut(text, find_input(text, renderings), begin, end);
    });
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_chat_open(const spec_chat_params * params, spec_chat ** out) {
    return guarded([&] {
        spec_chat *& slot = deref(out, "out");
        slot = nullptr;
        slot = open_chat(deref(params, "params")).release();
    });
}

void spec_chat_free(spec_chat * chat) {
    delete chat;
}

int32_t spec_chat_format(const spec_chat * chat, const char * const * roles,
                         const char * const * contents, size_t n_messages,
                         bool add_generation_prompt, char * buf, size_t cap, size_t * n_needed) {
    return guarded([&] {
        copy_out(format_chat(deref(chat, "chat"), roles, contents, n_messages, nullptr, nullptr, 0,
                             add_generation_prompt)
                     .text,
                 buf, cap, n_needed);
    });
}

int32_t spec_chat_format_marked(const spec_chat * chat, const char * const * roles,
                                const char * const * contents, size_t n_messages,
                                const char * const * names, const char * const * values,
                                size_t n_arguments, bool add_generation_prompt, char * buf,
                                size_t cap, size_t * n_needed, spec_span * input, size_t cap_input,
                                size_t * n_input) {
    return guarded([&] {
        deref(n_needed, "n_needed");
        size_t & n_spans = deref(n_input, "n_input");
        const formatted result = format_chat(deref(chat, "chat"), roles, contents, n_messages,
                                             names, values, n_arguments, add_generation_prompt);
        n_spans = result.input.size();
        if (n_spans > cap_input || (input == nullptr && n_spans > 0)) {
            *n_needed = result.text.size() + 1;
            fail(SPEC_ERR_BUFFER_TOO_SMALL,
                 "the chat has " + std::to_string(n_spans) + " spans of input");
        }
        copy_out(result.text, buf, cap, n_needed);
        std::copy(result.input.begin(), result.input.end(), input);
    });
}

} // extern "C"

// What asks a device for anything: not the load of the library, no chat template, no grammar and no
// vocabulary. A device of our own stands where ggml would have its RPC backend, and counts.

#include "spec.h"

#include "ggml-backend-impl.h"
#include "ggml-backend.h"

#include <cstdio>
#include <cstdlib>
#include <string>

extern "C" ggml_backend_reg_t ggml_backend_rpc_reg(void); // ours, below

namespace {

int n_lists = 0;   // of the backends, when a driver is asked for its devices
int n_touches = 0; // of the device

const char * name_of(ggml_backend_dev_t) {
    return "COUNT0";
}

void get_memory(ggml_backend_dev_t, size_t * n_free, size_t * n_total) {
    ++n_touches;
    *n_free = *n_total = 1 << 20;
}

enum ggml_backend_dev_type get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;
}

void get_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    *props = {};
    props->name = props->description = name_of(device);
    props->type = get_type(device);
    get_memory(device, &props->memory_free, &props->memory_total);
}

ggml_backend_t init_backend(ggml_backend_dev_t, const char *) {
    ++n_touches;
    return nullptr;
}

ggml_backend_buffer_type_t get_buffer_type(ggml_backend_dev_t) {
    ++n_touches;
    return nullptr;
}

bool supports_op(ggml_backend_dev_t, const ggml_tensor *) {
    ++n_touches;
    return false;
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t) {
    ++n_touches;
    return false;
}

const char * reg_name(ggml_backend_reg_t) {
    return "COUNT";
}

size_t device_count(ggml_backend_reg_t) {
    ++n_lists;
    return 1;
}

ggml_backend_dev_t get_device(ggml_backend_reg_t, size_t) {
    static ggml_backend_device device = [] {
        ggml_backend_device made = {};
        made.iface.get_name = made.iface.get_description = name_of;
        made.iface.get_memory = get_memory;
        made.iface.get_type = get_type;
        made.iface.get_props = get_props;
        made.iface.init_backend = init_backend;
        made.iface.get_buffer_type = get_buffer_type;
        made.iface.supports_op = supports_op;
        made.iface.supports_buft = supports_buft;
        made.reg = ggml_backend_rpc_reg();
        return made;
    }();
    return &device;
}

void * no_address(ggml_backend_reg_t, const char *) {
    return nullptr;
}

void expect(bool is_true, const char * what) {
    if (!is_true) {
        std::fprintf(stderr, "not true: %s (%d lists, %d touches)\n", what, n_lists, n_touches);
        std::exit(1);
    }
}

#define EXPECT(what) expect((what), #what)

void use_without_a_model() {
    char buf[64];
    size_t n = 0;
    bool accepts = false;
    spec_chat * chat = nullptr;
    const spec_chat_params params = {"{{ messages[0].content }}", "", "", false, false};
    const char * const roles[1] = {"user"};
    const char * const contents[1] = {"x"};

    EXPECT(spec_abi_version() == SPEC_ABI_VERSION);
    spec_set_log(nullptr, nullptr);
    EXPECT(spec_chat_open(&params, &chat) == SPEC_OK);
    EXPECT(spec_chat_format(chat, roles, contents, 1, true, buf, sizeof buf, &n) == SPEC_OK);
    spec_chat_free(chat);
    EXPECT(spec_grammar_check("root ::= \"a\"+") == SPEC_OK);
    EXPECT(spec_grammar_accepts("root ::= \"a\"+", "aa", 2, &accepts) == SPEC_OK && accepts);
    spec_cores cores;
    EXPECT(spec_find_cores(nullptr, nullptr, &cores) == SPEC_OK);
}

void use_a_vocabulary(const char * path) {
    spec_model_params params = {};
    params.path = path;
    params.n_gpu_layers = -1;
    params.use_mmap = true;
    params.vocab_only = true;
    spec_model * model = nullptr;
    EXPECT(spec_model_load(&params, &model) == SPEC_OK);
    int32_t tokens[16];
    size_t n = 0;
    EXPECT(spec_model_tokenize(model, "a text", 6, true, false, tokens, 16, &n) == SPEC_OK);
    spec_sampler_params sampling;
    spec_sampler_default_params(&sampling);
    sampling.grammar = "root ::= \"a\"+";
    spec_sampler * sampler = nullptr;
    EXPECT(spec_sampler_init(model, &sampling, &sampler) == SPEC_OK);
    spec_sampler_free(sampler);
    spec_model_free(model);
}

} // namespace

ggml_backend_reg_t ggml_backend_rpc_reg(void) {
    static ggml_backend_reg reg = {
        GGML_BACKEND_API_VERSION, {reg_name, device_count, get_device, no_address}, nullptr};
    return &reg;
}

int main(int argc, char ** argv) {
    EXPECT(argc == 2);
    use_without_a_model();
    EXPECT(n_lists == 0 && n_touches == 0);
    use_a_vocabulary(argv[1]);
    EXPECT(n_lists == 0 && n_touches == 0); // CUDA's list alone begins its driver
    spec_device devices[8];
    size_t n = 0;
    EXPECT(spec_list_devices(devices, 8, &n) == SPEC_OK && n == 2);
    EXPECT(n_lists > 0 && n_touches > 0); // so it counts
    bool is_found = false;
    for (size_t i = 0; i < n; ++i) {
        is_found = is_found || std::string(devices[i].name) == "COUNT0";
    }
    EXPECT(is_found);
    std::puts("ok");
    return 0;
}

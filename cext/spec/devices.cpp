// Devices: which there are, those of RPC servers, and where the weights of a model lie.

#include "internal.hpp"

#include "ggml-backend.h"
#include "ggml-cpu.h"
#ifdef GGML_USE_RPC
#include "ggml-rpc.h"
#endif

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <regex>
#include <string>
#include <vector>

namespace drafthouse {

namespace {

constexpr const char * EXPERTS = "\\.ffn_(up|down|gate|gate_up)_(ch|)exps"; // as llama.cpp's own

std::vector<std::string> parts_of(const std::string & list) {
    std::vector<std::string> parts;
    for (size_t at = 0; at <= list.size();) {
        const size_t end = std::min(list.find(',', at), list.size());
        parts.push_back(list.substr(at, end - at));
        at = end + 1;
    }
    return parts;
}

std::vector<ggml_backend_dev_t> all_devices() {
    init_devices();
    std::vector<ggml_backend_dev_t> devices(ggml_backend_dev_count());
    for (size_t i = 0; i < devices.size(); ++i) {
        devices[i] = ggml_backend_dev_get(i);
    }
    return devices;
}

bool is_cpu(ggml_backend_dev_t device) {
    return ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

const char * buffer_type_of(ggml_backend_dev_t device) {
    ggml_backend_buffer_type_t type = ggml_backend_dev_buffer_type(device);
    return type != nullptr ? ggml_backend_buft_name(type) : "";
}

// What may be named, for the error that names something else.
std::string names_of(bool wants_buffers) {
    std::string names;
    for (ggml_backend_dev_t device : all_devices()) {
        const std::string name =
            wants_buffers ? buffer_type_of(device) : ggml_backend_dev_name(device);
        if (!name.empty() && (wants_buffers || !is_cpu(device))) {
            names += (names.empty() ? "" : ", ") + name;
        }
    }
    return names;
}

std::vector<ggml_backend_dev_t> named_devices(const std::string & list) {
    std::vector<ggml_backend_dev_t> devices;
    for (const std::string & name : list == "none" ? std::vector<std::string>() : parts_of(list)) {
        ggml_backend_dev_t device = ggml_backend_dev_by_name(name.c_str());
        if (device == nullptr || is_cpu(device)) {
            const std::string names = names_of(false);
            fail(SPEC_ERR_INVALID_ARGUMENT, "there is no device \"" + name + "\"; expected none" +
                                                (names.empty() ? ": there is no device but the CPU"
                                                               : ", or some of " + names));
        }
        if (std::find(devices.begin(), devices.end(), device) != devices.end()) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "the device \"" + name + "\" is named twice");
        }
        devices.push_back(device);
    }
    if (devices.size() > SPEC_DEVICES_MAX) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "more than 16 devices are named");
    }
    devices.push_back(nullptr);
    return devices;
}

ggml_backend_buffer_type_t named_buffer(const std::string & name) {
    for (ggml_backend_dev_t device : all_devices()) {
        if (buffer_type_of(device) == name && !name.empty()) {
            return ggml_backend_dev_buffer_type(device);
        }
    }
    fail(SPEC_ERR_INVALID_ARGUMENT, "override_tensor names the buffer type \"" + name +
                                        "\"; expected one of " + names_of(true));
}

void add_override(placement & out, const std::string & pattern, ggml_backend_buffer_type_t type) {
    try {
        const std::regex compiled(pattern); // as llama.cpp will
    } catch (const std::regex_error & e) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "override_tensor has the pattern \"" + pattern +
                                            "\", which is no regular expression: " + e.what());
    }
    out.patterns.push_back(pattern);
    out.overrides.push_back({out.patterns.back().c_str(), type});
}

void add_overrides(placement & out, const std::string & list) {
    for (const std::string & part : parts_of(list)) {
        const size_t at = part.find('=');
        if (at == std::string::npos || at == 0) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "override_tensor has \"" + part + "\"; expected PATTERN=BUFFER TYPE");
        }
        add_override(out, part.substr(0, at), named_buffer(part.substr(at + 1)));
    }
}

void add_experts(placement & out, int32_t n) {
    ggml_backend_buffer_type_t cpu = ggml_backend_cpu_buffer_type();
    if (n < 0) {
        add_override(out, EXPERTS, cpu);
    }
    for (int32_t i = 0; i < n; ++i) {
        add_override(out, "blk\\." + std::to_string(i) + EXPERTS, cpu);
    }
}

llama_split_mode split_mode_of(int32_t mode) {
    constexpr llama_split_mode MODES[SPEC_SPLIT_COUNT] = {
        LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_ROW,
        LLAMA_SPLIT_MODE_TENSOR};
    check_range("split_mode", mode, 0, SPEC_SPLIT_COUNT - 1);
    return MODES[mode];
}

llama_load_mode load_mode_of(const spec_model_params & params) {
    constexpr llama_load_mode MODES[SPEC_LOAD_COUNT] = {
        LLAMA_LOAD_MODE_AUTO,     LLAMA_LOAD_MODE_AUTO,  LLAMA_LOAD_MODE_NONE,
        LLAMA_LOAD_MODE_MMAP,     LLAMA_LOAD_MODE_MLOCK, LLAMA_LOAD_MODE_MMAP_MLOCK,
        LLAMA_LOAD_MODE_DIRECT_IO};
    check_range("load_mode", params.load_mode, 0, SPEC_LOAD_COUNT - 1);
    if (params.load_mode == SPEC_LOAD_DEFAULT && !params.use_mmap) {
        return LLAMA_LOAD_MODE_NONE;
    }
    return MODES[params.load_mode];
}

// llama.cpp reads shares of as many devices as it can have.
void fill_shares(placement & out, const spec_model_params & params) {
    check_range("n_tensor_split", params.n_tensor_split, 0, SPEC_DEVICES_MAX);
    if (params.n_tensor_split == 0) {
        return;
    }
    const float * shares = &deref(params.tensor_split, "tensor_split");
    out.shares.assign(std::max<size_t>(llama_max_devices(), SPEC_DEVICES_MAX), 0.0f);
    for (int32_t i = 0; i < params.n_tensor_split; ++i) {
        check_range("tensor_split", static_cast<double>(shares[i]), 0, 1e6);
        out.shares[static_cast<size_t>(i)] = shares[i];
    }
}

// The devices that layers may lie on.
std::vector<ggml_backend_dev_t> used_devices(const placement & out) {
    std::vector<ggml_backend_dev_t> found = out.is_chosen ? out.devices : all_devices();
    const auto is_other = [&](ggml_backend_dev_t device) {
        if (device == nullptr || out.is_chosen) { // a chosen list ends with a null
            return device == nullptr;
        }
        const auto kind = ggml_backend_dev_type(device);
        return kind != GGML_BACKEND_DEVICE_TYPE_GPU && kind != GGML_BACKEND_DEVICE_TYPE_IGPU;
    };
    found.erase(std::remove_if(found.begin(), found.end(), is_other), found.end());
    return found;
}

bool has_row_buffers(ggml_backend_dev_t device) {
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    return ggml_backend_reg_get_proc_address(reg, "ggml_backend_split_buffer_type") != nullptr;
}

// llama.cpp refuses these later, and as if the file were at fault.
void check_split(const placement & out, const spec_model_params & params) {
    check_range("main_gpu", params.main_gpu, 0, SPEC_DEVICES_MAX - 1);
    const std::vector<ggml_backend_dev_t> devices = used_devices(out);
    const size_t n = devices.size();
    if (params.split_mode == SPEC_SPLIT_NONE && params.main_gpu > 0 &&
        n <= static_cast<size_t>(params.main_gpu)) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "main_gpu is " + std::to_string(params.main_gpu) +
                                            "; there are " + std::to_string(n) + " devices");
    }
    if (params.split_mode == SPEC_SPLIT_TENSOR && n == 0) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "split_mode tensor needs a device; there is none");
    }
    for (ggml_backend_dev_t device : devices) {
        if (params.split_mode == SPEC_SPLIT_ROW && !has_row_buffers(device)) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 std::string("split_mode is row, and the device ") + ggml_backend_dev_name(device) +
                     " cannot hold rows of a matrix; layer and none can be had on any device");
        }
    }
}

} // namespace

// The weights' places, as a load wants them; `params` are those of llama.cpp, to be filled. The
// result must live as long as the model.
std::unique_ptr<placement> place(const spec_model_params & from, llama_model_params & params) {
    auto out = std::make_unique<placement>();
    params.n_gpu_layers = from.n_gpu_layers;
    params.load_mode = load_mode_of(from);
    params.split_mode = split_mode_of(from.split_mode);
    params.main_gpu = from.main_gpu;
    if (from.vocab_only) { // a vocabulary has no use for a device
        params.split_mode = LLAMA_SPLIT_MODE_LAYER;
        out->devices = {nullptr};
        params.devices = out->devices.data();
        return out;
    }
    init_devices();
    const std::string devices = from.devices != nullptr ? from.devices : "";
    out->is_chosen = !devices.empty();
    if (out->is_chosen) {
        out->devices = named_devices(devices);
        params.devices = out->devices.data();
    }
    check_split(*out, from);
    fill_shares(*out, from);
    params.tensor_split = out->shares.empty() ? nullptr : out->shares.data();
    check_range("n_cpu_moe", from.n_cpu_moe, -1, 10000);
    if (from.override_tensor != nullptr && *from.override_tensor != '\0') {
        add_overrides(*out, from.override_tensor);
    }
    add_experts(*out, from.n_cpu_moe);
    if (!out->overrides.empty()) {
        out->overrides.push_back({nullptr, nullptr});
        params.tensor_buft_overrides = out->overrides.data();
    }
    return out;
}

namespace {

const char * name_of(llama_split_mode mode) {
    switch (mode) {
    case LLAMA_SPLIT_MODE_NONE:
        return "none";
    case LLAMA_SPLIT_MODE_ROW:
        return "row";
    case LLAMA_SPLIT_MODE_TENSOR:
        return "tensor";
    default:
        return "layer";
    }
}

std::string joined(const std::vector<std::string> & parts) {
    std::string text;
    for (const std::string & part : parts) {
        text += (text.empty() ? "" : ",") + part;
    }
    return text;
}

std::string buffers_of(const llama_model * model) {
    std::map<std::string, size_t> n_bytes;
    for (const auto & [name, tensor] : tensors_of(model)) {
        if (tensor->buffer != nullptr) {
            n_bytes[ggml_backend_buffer_name(tensor->buffer)] += ggml_nbytes(tensor);
        }
    }
    std::vector<std::string> parts;
    for (const auto & [name, n] : n_bytes) {
        parts.push_back(name + "=" + std::to_string(n));
    }
    return joined(parts);
}

// Whether of a weight no more than a row for each token is read: llama.cpp keeps these with the CPU
// wherever the layers are.
bool is_table(const std::string & name) {
    constexpr const char * TABLES[] = {"token_embd", "token_types", "position_embd",
                                       "per_layer_token_embd"};
    return std::any_of(std::begin(TABLES), std::end(TABLES), [&](const std::string table) {
        return name.compare(0, table.size(), table) == 0;
    });
}

// Bytes of the weights that the CPU computes with. Tables count where it computes with all: one of
// them may be the head, too.
size_t host_bytes_of(const llama_model * model) {
    size_t n_all = 0;
    size_t n_computed = 0;
    bool has_device = false;
    for (const auto & [name, tensor] : tensors_of(model)) {
        if (tensor->buffer == nullptr) {
            continue;
        }
        ggml_backend_dev_t device =
            ggml_backend_buft_get_device(ggml_backend_buffer_get_type(tensor->buffer));
        const bool is_here =
            ggml_backend_buffer_is_host(tensor->buffer) || device == nullptr || is_cpu(device);
        has_device = has_device || !is_here;
        n_all += is_here ? ggml_nbytes(tensor) : 0;
        n_computed += is_here && !is_table(name) ? ggml_nbytes(tensor) : 0;
    }
    return has_device ? n_computed : n_all;
}

std::string buffer_of(const llama_model * model, const std::string & wanted) {
    for (const auto & [name, tensor] : tensors_of(model)) {
        if (name == wanted && tensor->buffer != nullptr) {
            return ggml_backend_buffer_name(tensor->buffer);
        }
    }
    fail(SPEC_ERR_NOT_FOUND, "the model has no tensor \"" + wanted + "\"");
}

std::string model_setting(const spec_model & model, const std::string & key) {
    constexpr const char BUFFER[] = "buffer:";
    const llama_model * m = model.model.get();
    if (key == "device") {
        return joined(devices_of(m));
    }
    if (key == "split_mode") {
        return name_of(split_of(m));
    }
    if (key == "tensor_split") {
        std::vector<std::string> parts;
        for (const float share : shares_of(m)) {
            parts.push_back(shortest(share));
        }
        return joined(parts);
    }
    if (key == "gpu_layers") {
        return std::to_string(layers_on_devices(m));
    }
    if (key == "buffers") {
        return buffers_of(m);
    }
    if (key == "host_bytes") {
        return std::to_string(host_bytes_of(m));
    }
    if (key.compare(0, sizeof BUFFER - 1, BUFFER) == 0) {
        return buffer_of(m, key.substr(sizeof BUFFER - 1));
    }
    fail(SPEC_ERR_INVALID_ARGUMENT, "a model has no setting \"" + key + "\"");
}

void add_rpc_server(const std::string & endpoint) {
    // Without a port llama.cpp ends the process.
    const size_t at = endpoint.rfind(':');
    const std::string port = at == std::string::npos ? "" : endpoint.substr(at + 1);
    if (at == 0 || endpoint.find(':') != at || port.empty() || port.size() > 5 ||
        !std::all_of(port.begin(), port.end(), [](char c) { return c >= '0' && c <= '9'; }) ||
        std::stoi(port) < 1 || std::stoi(port) > 65535) {
        fail(SPEC_ERR_INVALID_ARGUMENT,
             "the RPC server \"" + endpoint + "\" is not of the form host:port");
    }
    init_devices();
    ggml_backend_reg_t rpc = ggml_backend_reg_by_name("RPC");
    using add_server = ggml_backend_reg_t (*)(const char *);
    const auto add =
        rpc == nullptr ? nullptr
                       : reinterpret_cast<add_server>(
                             ggml_backend_reg_get_proc_address(rpc, "ggml_backend_rpc_add_server"));
    if (add == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "this build has no RPC backend; build with DRAFTHOUSE_RPC=ON");
    }
    static std::mutex lock;
    static std::vector<ggml_backend_reg_t> known;
    const std::lock_guard<std::mutex> guard(lock);
    ggml_backend_reg_t reg = add(endpoint.c_str());
    if (reg == nullptr) {
        fail(SPEC_ERR_UNSUPPORTED, "the RPC server " + endpoint + " has no devices");
    }
    if (std::find(known.begin(), known.end(), reg) == known.end()) {
        known.push_back(reg);
        ggml_backend_register(reg);
    }
}

void tell_rpc_version(int32_t & major, int32_t & minor) {
#ifdef GGML_USE_RPC
    major = RPC_PROTO_MAJOR_VERSION;
    minor = RPC_PROTO_MINOR_VERSION;
#else
    major = minor = 0;
    fail(SPEC_ERR_UNSUPPORTED, "this build has no RPC backend; build with DRAFTHOUSE_RPC=ON");
#endif
}

void set_numa(int32_t numa, int32_t * n_nodes) {
    constexpr ggml_numa_strategy STRATEGIES[SPEC_NUMA_COUNT] = {
        GGML_NUMA_STRATEGY_DISABLED, GGML_NUMA_STRATEGY_DISTRIBUTE, GGML_NUMA_STRATEGY_ISOLATE,
        GGML_NUMA_STRATEGY_NUMACTL};
    static std::mutex lock;
    static int32_t chosen = SPEC_NUMA_OFF;
    check_range("numa", numa, 0, SPEC_NUMA_COUNT - 1);
    const std::lock_guard<std::mutex> guard(lock);
    if (chosen != SPEC_NUMA_OFF && chosen != numa) {
        fail(SPEC_ERR_BAD_PLAN, "numa was chosen before, and otherwise; it holds for the process");
    }
    if (numa != SPEC_NUMA_OFF && chosen == SPEC_NUMA_OFF) {
        init_devices();
        llama_numa_init(STRATEGIES[numa]);
        chosen = numa;
    }
    if (n_nodes != nullptr) {
        *n_nodes = ggml_is_numa() ? 2 : 1;
    }
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_add_rpc_server(const char * endpoint) {
    return guarded([&] { add_rpc_server(&deref(endpoint, "endpoint")); });
}

int32_t spec_rpc_version(int32_t * major, int32_t * minor) {
    return guarded([&] { tell_rpc_version(deref(major, "major"), deref(minor, "minor")); });
}

int32_t spec_set_numa(int32_t numa, int32_t * n_nodes) {
    return guarded([&] { set_numa(numa, n_nodes); });
}

int32_t spec_model_setting(const spec_model * model, const char * key, char * buf, size_t cap,
                           size_t * n_needed) {
    return guarded([&] {
        const spec_model & m = deref(model, "model");
        if (m.vocab_only) {
            fail(SPEC_ERR_INVALID_ARGUMENT, "the model was loaded with vocab_only");
        }
        copy_out(model_setting(m, &deref(key, "key")), buf, cap, n_needed);
    });
}

} // extern "C"

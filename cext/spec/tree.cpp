// Draft trees of a decoder.

#include "internal.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace drafthouse {

namespace {

void drop_tree(spec_decoder & decoder) {
    for (int32_t i = 0; i < decoder.n_branches; ++i) {
        llama_memory_seq_rm(decoder.memory(), decoder.limits.n_seq_max + i, -1, -1);
    }
    decoder.tree.clear();
    decoder.n_branches = 0;
    decoder.tree_owner = -1;
}

void check_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens,
                const int32_t * parents, int32_t n) {
    at(decoder, seq_id);
    if (decoder.limits.n_branch_max == 0) {
        fail(SPEC_ERR_UNSUPPORTED,
             is_recurrent_model(*decoder.model)
                 ? "a recurrent model has one state per sequence; it cannot score a tree"
                 : "this context was made without branches, or its cache cannot share cells");
    }
    if (decoder.tree_owner >= 0 && decoder.tree_owner != seq_id) {
        bad_plan(seq_id, "a tree hangs on sequence " + std::to_string(decoder.tree_owner));
    }
    const int32_t n_old = static_cast<int32_t>(decoder.tree.size());
    check_range("n_nodes", n, 1,
                std::min(decoder.limits.n_outputs_max,
                         decoder.limits.n_outputs_max + N_TREE_SPARE - n_old));
    deref(tokens, "tokens");
    deref(parents, "parents");
    for (int32_t i = 0; i < n; ++i) {
        check_token(tokens[i], decoder.limits.n_vocab, "tokens");
        check_range("parent of a node", parents[i], -1, n_old + i - 1);
    }
}

// The nodes of the tree and the new ones, with the branches that pass through each new node.
// Nothing in the cache has changed yet.
struct tree_plan {
    std::vector<tree_node> nodes;
    std::vector<std::vector<llama_seq_id>> branches;      // of each new node
    std::vector<std::pair<llama_seq_id, int32_t>> copies; // branch, old node that it begins with
    int32_t n_branches = 0;
};

std::vector<bool> has_children(const std::vector<tree_node> & nodes) {
    std::vector<bool> found(nodes.size());
    for (const tree_node & node : nodes) {
        if (node.parent >= 0) {
            found[static_cast<size_t>(node.parent)] = true;
        }
    }
    return found;
}

// A branch for a leaf: that of the old node that its path begins with, where this node is the
// branch's tip and nobody took it yet, else a new one.
llama_seq_id branch_for(const spec_decoder & decoder, tree_plan & plan, std::vector<bool> & is_tip,
                        int32_t old) {
    if (old >= 0 && is_tip[static_cast<size_t>(old)]) {
        is_tip[static_cast<size_t>(old)] = false;
        return decoder.tree[static_cast<size_t>(old)].branch;
    }
    const llama_seq_id branch = decoder.limits.n_seq_max + plan.n_branches++;
    plan.copies.push_back({branch, old});
    return branch;
}

// Places the new nodes behind their parents.
void place_nodes(const spec_decoder & decoder, tree_plan & plan, const int32_t * parents, int32_t n,
                 int32_t n_past) {
    for (int32_t i = 0; i < n; ++i) {
        const llama_pos pos =
            parents[i] < 0 ? n_past : plan.nodes[static_cast<size_t>(parents[i])].pos + 1;
        plan.nodes.push_back({parents[i], pos, -1});
        check_decoder_room(decoder, int64_t{pos} + 1);
    }
}

// Gives each new leaf a branch, and with it all new nodes on its path.
void give_branches(const spec_decoder & decoder, tree_plan & plan) {
    const int32_t n_old = static_cast<int32_t>(decoder.tree.size());
    const int32_t n_all = static_cast<int32_t>(plan.nodes.size());
    std::vector<bool> is_tip = has_children(decoder.tree);
    is_tip.flip();
    const std::vector<bool> is_inner = has_children(plan.nodes);
    for (int32_t leaf = n_old; leaf < n_all; ++leaf) {
        if (is_inner[static_cast<size_t>(leaf)]) {
            continue;
        }
        int32_t old = leaf;
        while (old >= n_old) {
            old = plan.nodes[static_cast<size_t>(old)].parent;
        }
        const llama_seq_id branch = branch_for(decoder, plan, is_tip, old);
        for (int32_t i = leaf; i >= n_old; i = plan.nodes[static_cast<size_t>(i)].parent) {
            plan.branches[static_cast<size_t>(i - n_old)].push_back(branch);
            plan.nodes[static_cast<size_t>(i)].branch =
                plan.branches[static_cast<size_t>(i - n_old)].front();
        }
    }
}

tree_plan plan_tree(const spec_decoder & decoder, int32_t seq_id, const int32_t * parents,
                    int32_t n) {
    tree_plan plan;
    plan.nodes = decoder.tree;
    plan.n_branches = decoder.n_branches;
    plan.branches.resize(static_cast<size_t>(n));
    place_nodes(decoder, plan, parents, n, seq_of(decoder, seq_id).n_past);
    give_branches(decoder, plan);
    if (plan.n_branches > decoder.limits.n_branch_max) {
        fail(SPEC_ERR_INVALID_ARGUMENT, "the tree needs " + std::to_string(plan.n_branches) +
                                            " branches; this context has " +
                                            std::to_string(decoder.limits.n_branch_max));
    }
    return plan;
}

// Whether a branch can be cut to one of its nodes: a tree deeper than the window loses its top.
void check_node_held(const spec_decoder & decoder, const tree_node & node) {
    if (!holds_window(decoder.context.get(), node.branch, node.pos + 1)) {
        no_window(node.pos + 1);
    }
}

void check_copies(const spec_decoder & decoder, const tree_plan & plan) {
    for (const auto & [branch, old] : plan.copies) {
        if (old >= 0) {
            check_node_held(decoder, decoder.tree[static_cast<size_t>(old)]);
        }
    }
}

void copy_branches(spec_decoder & decoder, int32_t seq_id, const tree_plan & plan) {
    const int32_t n_past = seq_of(decoder, seq_id).n_past;
    for (const auto & [branch, old] : plan.copies) {
        const bool is_node = old >= 0;
        const tree_node node = is_node ? decoder.tree[static_cast<size_t>(old)] : tree_node{};
        llama_memory_seq_cp(decoder.memory(), is_node ? node.branch : seq_id, branch, 0,
                            is_node ? node.pos + 1 : n_past);
    }
}

// The batch of the new nodes, on branches of their own.
void build_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens, size_t n,
                const tree_plan & plan) {
    const size_t n_old = decoder.tree.size();
    copy_branches(decoder, seq_id, plan);
    decoder.batch.clear();
    for (size_t i = 0; i < n; ++i) {
        decoder.batch.add(tokens[i], plan.nodes[n_old + i].pos, plan.branches[i], true);
    }
}

void decode_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * tokens,
                 const int32_t * parents, int32_t n) {
    check_tree(decoder, seq_id, tokens, parents, n);
    check_states(decoder, n);
    tree_plan plan = plan_tree(decoder, seq_id, parents, n);
    check_copies(decoder, plan);
    decoder.n_branches = plan.n_branches; // from here on there are cells to be given back
    try {
        build_tree(decoder, seq_id, tokens, static_cast<size_t>(n), plan);
    } catch (...) {
        drop_tree(decoder);
        throw;
    }
    const int32_t rc = run_decoder(decoder, true);
    if (rc != 0) {
        drop_tree(decoder);
        fail(rc == 1 ? SPEC_ERR_NO_ROOM : SPEC_ERR_DECODE_FAILED,
             "the tree could not be decoded (" + decode_reason(rc) +
                 "); it is gone, the sequence is as it was" + llama_reason());
    }
    decoder.tree = std::move(plan.nodes);
    decoder.tree_owner = seq_id;
}

void check_path(const spec_decoder & decoder, const int32_t * path, int32_t n) {
    check_range("n_path", n, 0, static_cast<double>(decoder.tree.size()));
    int32_t parent = -1;
    for (int32_t i = 0; i < n; ++i) {
        const int32_t node = (&deref(path, "path"))[i];
        check_range("node of the path", node, 0, static_cast<double>(decoder.tree.size()) - 1);
        if (decoder.tree[static_cast<size_t>(node)].parent != parent) {
            fail(SPEC_ERR_INVALID_ARGUMENT,
                 "node " + std::to_string(node) + " does not follow the one before it in the path");
        }
        parent = node;
    }
}

void commit_tree(spec_decoder & decoder, int32_t seq_id, const int32_t * path, int32_t n) {
    decoder_sequence & seq = at(decoder, seq_id);
    if (decoder.tree_owner != seq_id) {
        bad_plan(seq_id, "no tree hangs on it");
    }
    check_path(decoder, path, n);
    if (n > 0) {
        const tree_node & last = decoder.tree[static_cast<size_t>(path[n - 1])];
        check_node_held(decoder, last);
        try {
            llama_memory_seq_cp(decoder.memory(), last.branch, seq_id, seq.n_past, last.pos + 1);
        } catch (...) {
            llama_memory_seq_rm(decoder.memory(), seq_id, seq.n_past, -1);
            throw;
        }
        seq.n_past = last.pos + 1;
    }
    drop_tree(decoder);
}

} // namespace

} // namespace drafthouse

using namespace drafthouse;

extern "C" {

int32_t spec_decoder_tree(spec_decoder * decoder, int32_t seq_id, const int32_t * tokens,
                          const int32_t * parents, int32_t n_nodes) {
    return guarded(
        [&] { decode_tree(deref(decoder, "decoder"), seq_id, tokens, parents, n_nodes); });
}

int32_t spec_decoder_tree_commit(spec_decoder * decoder, int32_t seq_id, const int32_t * path,
                                 int32_t n_path) {
    return guarded([&] { commit_tree(deref(decoder, "decoder"), seq_id, path, n_path); });
}

} // extern "C"

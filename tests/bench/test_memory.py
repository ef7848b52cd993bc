"""What a step reads of a model, and how fast this machine reads."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from drafthouse_bench.memory import bytes_per_step, read_bytes_per_s

SHAPES = {
    "token_embd.weight": (10, 4),
    "output.weight": (10, 4),
    "output_norm.weight": (4,),
    "blk.0.ffn_up.weight": (6, 4),
    "blk.1.nextn.eh_proj.weight": (8, 4),
}


def write(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(("is_tied", "n_values"), [(False, 40 + 4 + 24), (True, 40 + 4 + 24)])
def test_a_step_reads_the_head_and_the_blocks_that_do_not_draft(
    tmp_path: Path, is_tied: bool, n_values: int
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "mimo2")
    writer.add_block_count(2)
    writer.add_nextn_predict_layers(1)
    for name, shape in SHAPES.items():
        if not (is_tied and name == "output.weight"):
            writer.add_tensor(name, np.zeros(shape, np.float32))
    write(writer)
    assert bytes_per_step(path) == 4 * n_values


@pytest.mark.parametrize(("n_streams", "n_read"), [(1, 2), (2, 3.5), (1000, 8)])
def test_a_step_reads_the_experts_that_its_streams_choose(
    tmp_path: Path, n_streams: int, n_read: float
) -> None:
    path = tmp_path / "model.gguf"
    writer = GGUFWriter(path, "qwen3moe")
    writer.add_block_count(1)
    writer.add_expert_count(8)
    writer.add_expert_used_count(2)
    writer.add_tensor("blk.0.ffn_up_exps.weight", np.zeros((8, 6, 4), np.float32))
    writer.add_tensor("blk.0.ffn_up_shexp.weight", np.zeros((6, 4), np.float32))
    write(writer)
    assert bytes_per_step(path, n_streams) == 4 * 24 * (n_read + 1)


def test_memory_is_read_at_some_speed() -> None:
    assert 1e6 < read_bytes_per_s(1) < 1e13

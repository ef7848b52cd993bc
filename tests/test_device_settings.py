"""Settings of devices: their rules, and how each arrives in the engine's parameters."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.built import needs_extension

from drafthouse_server import devices
from drafthouse_server.cli import settings as flags
from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError


def test_rpc_servers_are_off_and_beyond_loopback_only_when_told() -> None:
    assert Config().rpc == ()
    for near in ("127.0.0.1:50052", "localhost:1", "127.9.9.9:65535"):
        assert Config(rpc=(near,)).rpc == (near,)
    far = ("127.0.0.1:50052", "10.0.0.7:50052")
    with pytest.raises(ConfigError, match=r"10\.0\.0\.7:50052 is on another machine.*insecure_rpc"):
        Config(rpc=far)
    assert Config(rpc=far, insecure_rpc=True).rpc == far


@pytest.mark.parametrize(
    "settings",
    [
        {"rpc": ("127.0.0.1",)},
        {"rpc": ("127.0.0.1:0",)},
        {"rpc": ("127.0.0.1:99999",)},
        {"rpc": ("[::1]:5",)},
        {"rpc": ("127.0.0.1:5", "127.0.0.1:5")},
        {"tensor_split": ("3", "x")},
        {"tensor_split": ("-1",)},
        {"tensor_split": ("1",) * 17},
        {"override_tensor": ("ffn",)},
        {"override_tensor": ("=CPU",)},
        {"split_mode": "rows"},
        {"load_mode": "fast"},
        {"numa": "mirror"},
        {"cache_type_k": "q2_k"},
        {"cache_type_v": "q8_0", "flash_attn": "off"},
        {"cache_type_v_draft": "iq4_nl", "flash_attn": "off"},
        {"rope_scaling": "longrope"},
        {"rope_scale": -1.0},
        {"rope_scaling": "none", "rope_scale": 4.0},
        {"rope_freq_base": -1.0},
        {"rope_freq_base": 1e13},
        {"yarn_ext_factor": -0.5},
        {"main_gpu": 16},
        {"cpu_moe": True, "n_cpu_moe": 3},
        {"cpu_moe_draft": True, "n_cpu_moe_draft": 3, "model_draft": "d.gguf"},
        {"cpu_moe_draft": True},
        {"n_cpu_moe_draft": 3},
        {"device_draft": ("RPC0",)},
        {"gpu_layers_draft": 3},
        {"gpu_layers_draft": -2, "model_draft": "d.gguf"},
    ],
    ids=str,
)
def test_values_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Config(**settings)


@pytest.mark.parametrize(
    ("other", "meant"),
    [
        ("--spec-draft-cpu-moe", "--cpu-moe-draft"),
        ("--spec-draft-n-cpu-moe", "--n-cpu-moe-draft"),
        ("--spec-draft-ncmoe", "--n-cpu-moe-draft"),
    ],
)
def test_other_names_of_llama_server_lead_to_ours(other: str, meant: str) -> None:
    assert flags.similar_flag(other) == meant


class TestEngine:
    """What the engine is told."""

    pytestmark = needs_extension()

    @pytest.mark.parametrize(
        ("settings", "part", "field", "wanted"),
        [
            ({}, "placement", "devices", None),
            ({"device": ("none",)}, "placement", "devices", ()),
            ({"device": ("CUDA0", "RPC0")}, "placement", "devices", ("CUDA0", "RPC0")),
            ({"split_mode": "row"}, "placement", "split_mode", "row"),
            ({"tensor_split": ("3", "1")}, "placement", "tensor_split", (3.0, 1.0)),
            ({"main_gpu": 1}, "placement", "main_gpu", 1),
            ({"cpu_moe": True}, "placement", "n_cpu_moe", -1),
            ({"n_cpu_moe": 4}, "placement", "n_cpu_moe", 4),
            (
                {"override_tensor": ("a=CPU", "b=CPU")},
                "placement",
                "override_tensor",
                "a=CPU,b=CPU",
            ),
            ({"load_mode": "mlock"}, "placement", "load_mode", "mlock"),
            ({"device": ("CUDA0",)}, "draft", "devices", ("CUDA0",)),
            ({"device_draft": ("none",)}, "draft", "devices", ()),
            ({"device": ("CUDA0",), "device_draft": ("RPC0",)}, "draft", "devices", ("RPC0",)),
            ({"tensor_split": ("3", "1")}, "draft", "tensor_split", (3.0, 1.0)),
            ({"device_draft": ("A",), "tensor_split": ("3",)}, "draft", "tensor_split", ()),
            ({"device_draft": ("A",), "main_gpu": 1}, "draft", "main_gpu", 0),
            ({"cpu_moe": True}, "draft", "n_cpu_moe", 0),
            ({"cpu_moe_draft": True}, "draft", "n_cpu_moe", -1),
            ({"n_cpu_moe_draft": 2}, "draft", "n_cpu_moe", 2),
            ({"device_draft": ("A",), "n_cpu_moe_draft": 2}, "draft", "n_cpu_moe", 2),
            ({"cpu_moe_draft": True}, "placement", "n_cpu_moe", 0),
            ({"override_tensor": ("a=CPU",)}, "draft", "override_tensor", ""),
            ({"device_draft": ("A",), "load_mode": "mlock"}, "draft", "load_mode", "mlock"),
            ({"cache_type_k": "q8_0"}, "cache", "type_k", "q8_0"),
            ({"cache_type_v": "q8_0"}, "cache", "type_v", "q8_0"),
            ({"cache_type_k_draft": "q8_0"}, "cache", "type_k_draft", "q8_0"),
            ({"cache_type_v_draft": "q8_0"}, "cache", "type_v_draft", "q8_0"),
            ({"swa_full": False}, "cache", "swa_full", False),
            ({"rope_scaling": "yarn"}, "rope", "scaling", "yarn"),
            ({"rope_scale": 4.0}, "rope", "freq_scale", 0.25),
            ({"rope_freq_base": 1e6}, "rope", "freq_base", 1e6),
            ({"yarn_orig_ctx": 512}, "rope", "yarn_orig_ctx", 512),
            ({"yarn_ext_factor": 0.5}, "rope", "yarn_ext_factor", 0.5),
            ({"yarn_attn_factor": 0.5}, "rope", "yarn_attn_factor", 0.5),
            ({"yarn_beta_slow": 0.5}, "rope", "yarn_beta_slow", 0.5),
            ({"yarn_beta_fast": 0.5}, "rope", "yarn_beta_fast", 0.5),
        ],
        ids=str,
    )
    def test_each_setting_arrives(
        self, settings: dict[str, Any], part: str, field: str, wanted: object
    ) -> None:
        from drafthouse_server.engine import parameters

        make = {
            "placement": parameters.placement_of,
            "draft": parameters.draft_placement_of,
            "cache": parameters.cache_params,
            "rope": parameters.rope_params,
        }[part]
        drafter: dict[str, Any] = (
            {"draft_type": "simple", "model_draft": "d.gguf"}
            if part == "draft" or "cpu_moe_draft" in settings
            else {}
        )
        assert getattr(make(Config(**drafter, **settings)), field) == wanted

    def test_the_words_are_those_of_the_engine(self) -> None:
        import drafthouse_engine as engine

        assert devices.CACHE_TYPES == engine.CACHE_TYPES
        assert devices.SPLIT_MODES == engine.SPLIT_MODES
        assert ("default", *devices.LOAD_MODES) == engine.LOAD_MODES
        assert devices.NUMA_STRATEGIES == engine.NUMA_STRATEGIES
        assert devices.ROPE_SCALINGS == engine.ROPE_SCALINGS

"""What of the machine and the build does not go together."""

from __future__ import annotations

import resource

import pytest

from drafthouse_server.config import Config
from drafthouse_server.doctor import machine, model
from drafthouse_server.doctor.machine import machine_problems, machine_sections
from drafthouse_server.errors import StartupError
from drafthouse_server.host.engine import CoreFacts, DeviceFacts, EngineFacts
from drafthouse_server.host.fit import Size
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.needs import DeviceUse, Needs
from drafthouse_server.host.processor import Processor

HASWELL = frozenset({"SSE3", "SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2"})


def facts(*more: str, n_cores: int = 4, quota: float = 0.0) -> EngineFacts:
    gpu = DeviceFacts("CUDA0", "A card", "gpu", 8 << 30, 6 << 30)
    cores = CoreFacts(n_cores, n_cores, 2 * n_cores, quota)
    return EngineFacts({"llama_cpp": "b1"}, HASWELL | set(more), cores, (gpu,))


def cpu(*more: str, level: int = 3) -> Processor:
    return Processor("A CPU", level, HASWELL | set(more), 2)


def problems(config: Config, of: EngineFacts, processor: Processor) -> list[tuple[str, str]]:
    return [(it.check, it.severity) for it in machine_problems(config, of, processor)]


def test_a_build_of_this_machine_has_no_problem() -> None:
    assert problems(Config(), facts(), cpu()) == []


@pytest.mark.parametrize(
    ("of", "processor", "found"),
    [
        (facts("AVX512"), cpu(), [("cpu", "error")]),
        (facts(), cpu("AVX512", level=4), [("cpu", "warning")]),
        (facts("AVX512"), cpu(level=0), []),  # nothing is known of the CPU
        (facts("LLAMAFILE", "OPENMP", "REPACK"), cpu(), []),  # no instructions
    ],
)
def test_kernels_and_cpu_belong_together(
    of: EngineFacts, processor: Processor, found: list[tuple[str, str]]
) -> None:
    assert problems(Config(), of, processor) == found


def test_more_threads_than_cores_are_told() -> None:
    assert problems(Config(threads=4), facts(), cpu()) == []
    assert problems(Config(threads=5), facts(), cpu()) == [("threads", "warning")]


def test_too_few_threads_for_a_server_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve` refused to start, and doctor found nothing."""

    def refuse(n: int) -> None:
        raise StartupError(f"the server needs {n} more threads")

    monkeypatch.setattr(machine, "require_threads", refuse)
    assert problems(Config(), facts(), cpu()) == [("threads", "error")]


def limits(kind: int, hard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit

    def getrlimit(of: int) -> tuple[int, int]:
        return (hard, hard) if of == kind else real(of)

    for module in (machine, model):
        monkeypatch.setattr(module.resource, "getrlimit", getrlimit)


def test_few_descriptors_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(resource.RLIMIT_NOFILE, 256, monkeypatch)
    (problem,) = machine_problems(Config(), facts(), cpu())
    assert problem.check == "descriptors"
    assert "may open 256 files" in problem.sentence
    limits(resource.RLIMIT_NOFILE, resource.RLIM_INFINITY, monkeypatch)
    assert problems(Config(), facts(), cpu()) == []


def test_descriptors_that_leave_none_for_calls_are_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was a warning, and `serve` refused to start."""
    limits(resource.RLIMIT_NOFILE, 50, monkeypatch)
    assert problems(Config(), facts(), cpu()) == [("descriptors", "error")]


def test_every_fact_has_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    limits(resource.RLIMIT_MEMLOCK, 65536, monkeypatch)
    memory = HostMemory(8 << 30, 6 << 30, 2 << 30, 1 << 30)
    found = {
        section.name: {fact.key: fact for fact in section.facts}
        for section in machine_sections(facts(quota=2.5), cpu("AVX512", level=4), memory)
    }
    assert set(found) == {"build", "cpu", "devices", "memory", "limits"}
    assert found["build"]["llama_cpp"].value == "b1"
    assert found["cpu"]["level"].text == "x86-64-v4"
    assert found["cpu"]["unused"].value == ["AVX512"]
    assert found["cpu"]["cores"].text == "4 allowed by affinity (8 hardware threads)"
    assert found["cpu"]["quota"].text == "2.5 cores"
    assert found["cpu"]["numa_nodes"].value == 2
    assert found["devices"]["CUDA0"].text == "gpu, A card, 6.44 GB of 8.59 GB free"
    assert found["memory"]["free_bytes"].value == 1 << 30
    assert found["limits"]["locked_memory_bytes"].text == "65.5 kB"


def test_locks_that_are_not_allowed_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    locking = Config(load_mode="mlock")
    needs = Needs(Size(1, 1), "none", 1, DeviceUse(100_000, 0, 0, 0, 0), (), 0, 1000)
    limits(resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY, monkeypatch)
    assert list(model._lock_problems(locking, needs)) == []
    limits(resource.RLIMIT_MEMLOCK, 65536, monkeypatch)
    assert list(model._lock_problems(Config(), needs)) == []
    (locked,) = model._lock_problems(locking, needs)
    assert (locked.check, locked.severity) == ("locked_memory", "warning")
    assert "may lock 65.5 kB of the 100 kB of weights" in locked.sentence

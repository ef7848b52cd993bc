"""Facts on the build and the machine, and what of them does not go together."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from importlib.metadata import version

from drafthouse_server.config import Config
from drafthouse_server.doctor.report import Problem, Section
from drafthouse_server.errors import StartupError
from drafthouse_server.host.amounts import format_bytes
from drafthouse_server.host.engine import EngineFacts
from drafthouse_server.host.memory import HostMemory
from drafthouse_server.host.processor import Processor
from drafthouse_server.operations.descriptors import DescriptorBudget
from drafthouse_server.operations.threads import N_SERVER, require_threads

__all__ = ["machine_problems", "machine_sections"]

_N_SPARE_DESCRIPTORS = 64
"""Descriptors that the server itself needs: libraries, pipes to text workers, sockets."""


def machine_sections(
    facts: EngineFacts, processor: Processor, memory: HostMemory
) -> Iterator[Section]:
    """Yields what there is to know without a model."""
    yield _build(facts)
    yield _cpu(facts, processor)
    yield _devices(facts)
    yield _memory(memory)
    yield _limits()


def _build(facts: EngineFacts) -> Section:
    section = Section("build")
    section.add("drafthouse", version("drafthouse-server"))
    for key in ("llama_cpp", "patches", "kernels", "compiler", "target", "cpu", "backends"):
        section.add(key, facts.build.get(key, "unknown"))
    section.add("compiled_for", sorted(facts.features))
    return section


def _cpu(facts: EngineFacts, processor: Processor) -> Section:
    section = Section("cpu")
    section.add("name", processor.name or "unknown")
    if processor.level:
        section.add("level", f"x86-64-v{processor.level}")
        section.add("unused", sorted(processor.features - facts.features))
    cores = facts.cores
    shared = f" ({cores.n_logical} hardware threads)" if cores.n_logical > cores.n_physical else ""
    section.add("cores", cores.n_physical, f"{cores.n_physical} allowed by affinity{shared}")
    section.add("quota", cores.quota, f"{cores.quota:g} cores" if cores.quota else "none")
    section.add("usable_cores", cores.n_cores)
    section.add("numa_nodes", processor.n_nodes)
    return section


def _devices(facts: EngineFacts) -> Section:
    section = Section("devices")
    for device in facts.devices:
        size = f"{format_bytes(device.free_bytes)} of {format_bytes(device.total_bytes)} free"
        told = "" if device.kind == "cpu" or not device.total_bytes else f", {size}"
        section.add(
            device.name, device.free_bytes, f"{device.kind}, {device.description.strip()}{told}"
        )
    return section


def _memory(memory: HostMemory) -> Section:
    section = Section("memory")
    limit = format_bytes(memory.limit_bytes) if memory.limit_bytes else "none"
    for key, n_bytes, shown in (
        ("total_bytes", memory.total_bytes, ""),
        ("available_bytes", memory.available_bytes, ""),
        ("cgroup_limit_bytes", memory.limit_bytes, limit),
        ("free_bytes", memory.free_bytes, ""),
    ):
        if shown or memory.total_bytes:
            section.add(key, n_bytes, shown or format_bytes(n_bytes))
        else:
            section.add(key, None, "unknown")
    return section


def _limits() -> Section:
    section = Section("limits")
    for key, kind in (
        ("locked_memory_bytes", resource.RLIMIT_MEMLOCK),
        ("descriptors", resource.RLIMIT_NOFILE),
    ):
        _, hard = resource.getrlimit(kind)
        shown = format_bytes(hard) if key.endswith("_bytes") else str(hard)
        is_open = hard == resource.RLIM_INFINITY
        section.add(key, None if is_open else hard, "no limit" if is_open else shown)
    return section


def machine_problems(config: Config, facts: EngineFacts, processor: Processor) -> Iterator[Problem]:
    """Yields what is wrong without a model."""
    yield from _cpu_problems(facts, processor)
    n_cores = facts.cores.n_cores
    if config.threads > n_cores:
        yield Problem(
            "threads",
            f"threads is {config.threads}, and this process may use {n_cores} cores: threads that"
            f" wait for each other stand in each other's way; set threads to {n_cores}, or to 0",
            "warning",
        )
    try:
        require_threads(N_SERVER)
    except StartupError as error:
        yield Problem("threads", str(error))
    yield from _descriptor_problems(config)


def _cpu_problems(facts: EngineFacts, processor: Processor) -> Iterator[Problem]:
    known = processor.level > 0
    # What the kernel calls by another name, or not at all, is no fault of the CPU.
    lacking = sorted((facts.features & _TOLD) - processor.features) if known else []
    if lacking:
        yield Problem(
            "cpu",
            f"the engine was compiled for {', '.join(lacking)}, which this CPU lacks, and would end"
            " with an illegal instruction; build it on this machine, or install the wheel",
        )
    unused = sorted((processor.features & _WIDE) - facts.features) if known else []
    if unused:
        yield Problem(
            "cpu",
            f"the CPU has {', '.join(unused)}, which the engine was not compiled for; built on this"
            " machine without DRAFTHOUSE_PORTABLE it would be faster",
            "warning",
        )


_WIDE = frozenset({"AVX2", "AVX512", "AVX512_VNNI", "AVX512_BF16", "AMX_INT8"})
"""What makes a difference of more than a little."""

_TOLD = frozenset({"SSSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2", "AVX512", "AVX512_VBMI",
                   "AVX512_VNNI", "AVX512_BF16", "AVX_VNNI", "AMX_INT8"})  # fmt: skip
"""What /proc/cpuinfo tells of every CPU that has it."""


def _descriptor_problems(config: Config) -> Iterator[Problem]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        try:
            DescriptorBudget(config.reserved_descriptors, n_limit=lambda: hard).require()
        except StartupError as error:
            yield Problem("descriptors", str(error))
            return
    n_calls = config.max_calls or config.parallel + config.queue_size
    n_needed = n_calls + 2 * config.reserved_descriptors + _N_SPARE_DESCRIPTORS
    if hard != resource.RLIM_INFINITY and hard < n_needed:
        yield Problem(
            "descriptors",
            f"this process may open {hard} files and connections, and {n_calls} calls, each on a"
            f" connection of its own, need {n_needed}; raise the limit (`ulimit -n`, LimitNOFILE),"
            " or lower parallel, queue_size or max_calls",
            "warning",
        )

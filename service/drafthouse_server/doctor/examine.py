"""Puts a report together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from drafthouse_server.config import Config
from drafthouse_server.doctor.machine import machine_problems, machine_sections
from drafthouse_server.doctor.model import examine_model
from drafthouse_server.doctor.report import Problem, Report
from drafthouse_server.doctor.surroundings import CHECKS, is_set_up
from drafthouse_server.engine.loading import engine_facts
from drafthouse_server.errors import StartupError
from drafthouse_server.host.engine import EngineFacts
from drafthouse_server.host.memory import read_memory
from drafthouse_server.host.processor import read_processor

__all__ = ["examine"]

_N_SHOWN_MAX = 200
"""Characters of a path that are shown."""


def examine(config: Config | None, found: Sequence[Problem] = ()) -> Report:
    """Returns what is to be told of the machine, and of a server with these settings.

    Args:
        config: The settings; None where they could not be read: then of the machine alone.
        found: What is wrong with them.
    """
    report = Report(problems=list(found))
    processor, memory = read_processor(), read_memory()
    try:
        facts = engine_facts()
    except StartupError as error:
        report.problems.append(Problem("build", f"{error}; run `make build`, or install the wheel"))
        return report
    found_by: dict[str, list[Problem]] = {}
    if config is not None and config.rpc:
        facts, found_by["rpc"] = _with_rpc_servers(facts, config.rpc)
    report.sections += machine_sections(facts, processor, memory)
    if config is None:
        return report
    found_by["cpu, threads, descriptors"] = [*machine_problems(config, facts, processor)]
    room = {it.name: it.free_bytes for it in facts.devices if it.kind != "cpu"}
    sections, found_by["model, memory"] = examine_model(config, memory, room)
    report.sections += sections
    for name, check in CHECKS.items():
        if is_set_up(name, config):
            found_by[name] = _run_check(name, check, config)
        else:
            report.left_out.append(name)
    for name, problems in found_by.items():
        report.problems += problems
        if not problems:
            report.passed.append(name)
    return report


def _run_check(
    name: str, check: Callable[[Config], Iterator[Problem]], config: Config
) -> list[Problem]:
    """Returns what a check finds; a place that cannot even be looked at is a problem."""
    try:
        return [*check(config)]
    except OSError as error:  # a name that is too long, a folder that may not be entered
        place = str(error.filename or "a file")
        shown = place if len(place) <= _N_SHOWN_MAX else f"{place[:_N_SHOWN_MAX]}…"
        reason = (error.strerror or str(error)).lower()
        return [Problem(name, f"{shown} cannot be looked at: {reason}; check path and permissions")]


def _with_rpc_servers(
    facts: EngineFacts, endpoints: Sequence[str]
) -> tuple[EngineFacts, list[Problem]]:
    """Returns the facts with the devices of those RPC servers that answer, and which do not."""
    problems = []
    answering: tuple[str, ...] = ()
    for endpoint in endpoints:
        try:
            facts = engine_facts((*answering, endpoint))
        except StartupError as error:
            problems.append(Problem("rpc", f"{error}; start it, or take it out of rpc"))
        else:
            answering += (endpoint,)
    return facts, problems

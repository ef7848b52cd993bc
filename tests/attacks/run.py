"""Runs the attack scripts, each against a server of its own, and prints whether it holds.

    python -m tests.attacks.run [--only a04,a13] [--rounds 3] [--seconds 12] [--alone] [--bare]
        [--json build/attacks.json] [--timelines FOLDER]

Each attack runs alone and beside two polite tenants that generate a text every 200 ms; an attacker
is niced, since on a real network it has a machine of its own. Its verdict is that of the median
round: VULNERABLE if most rounds were. The exit code is 1 if any is. Which fault a script shows, and
the bound that it is judged by, is told by its docstring; a bound on times is for the median, and
for the 95th percentile where that is beyond a step under way (40 ms). Both are printed.

What gRPC for Python cannot bound (a18) is tried through Envoy with deploy/envoy.yaml, attackers and
victims alike; `--bare` leaves Envoy out and shows what the server does by itself.

Times depend on the machine, so this is a program and no test; the scripts that need none run in
`make test` (test_attacks.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.attacks.server import KEYS, Served, ended_within, is_behind_envoy, serving
from tests.support.envoy import program

__all__ = ["Outcome", "attack", "names"]

_ATTACKER, _VICTIM, _THIRD = KEYS
_LONGEST_S = 240.0
_DRAIN_S = 45.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of an attack showed."""

    name: str
    """The attack's."""
    verdict: str
    """ok, VULNERABLE, or ? where it cannot tell."""
    figures: str
    """What it measured."""
    is_alive: bool
    """Whether the server ran on."""
    has_drained: bool
    """Whether it ended when it was asked to."""

    @property
    def is_ok(self) -> bool:
        """Whether the server held."""
        return self.verdict == "ok" and self.is_alive and self.has_drained


def names(only: str = "") -> list[str]:
    """Returns the attacks whose names begin with one of those given; all without any."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("a[0-9][0-9]_*.py"))
    wanted = tuple(part for part in only.split(",") if part)
    return [name for name in found if name.startswith(wanted)] if wanted else found


def _command(name: str, served: Served, seconds: float, patience: float) -> list[str]:
    command = [sys.executable, "-m", f"tests.attacks.{name}", served.target]
    command += ["--key", _ATTACKER, "--other-key", _VICTIM, "--victim-key", _THIRD]
    command += ["--seconds", str(seconds), "--patience", str(patience)]
    more = {
        "a10": ["--pid", str(served.process.pid)],
        "a11": ["--sigterm", str(served.process.pid)],
        "a18": ["--ca-file", served.ca_file, "--log", str(served.log)],
        "a19": ["--metrics-port", str(served.metrics_port)],
        "a21": ["--log", str(served.log), "--requests", "60"],  # or others' lines count most
        "a23": ["--pid", str(served.process.pid), "--metrics-port", str(served.metrics_port)],
    }
    return command + more.get(name[:3], [])


@contextlib.contextmanager
def _polite(served: Served, seconds: float) -> Iterator[None]:
    """Two tenants that generate a text now and then."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.attacks.probe", served.target, "text", str(seconds)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ, PROBE_KEY=key, PROBE_CA_FILE=served.ca_file),
        )
        for key in (_VICTIM, _THIRD)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def attack(
    name: str,
    *,
    seconds: float = 12.0,
    patience: float = 1.0,
    is_polite: bool = False,
    is_bare: bool = False,
    timeline: Path | None = None,
) -> Outcome:
    """Runs one attack against a new server.

    Args:
        name: The script's.
        seconds: How long it may attack, about.
        patience: Times as long as on a quiet machine that what must come may take.
        is_polite: Whether two other tenants use the server meanwhile.
        is_bare: Whether Envoy is left out where it belongs in front.
        timeline: A file for what the server notes of each request (`drafthouse-bench timeline`).
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(name, Path(folder), timeline, is_bare=is_bare) as served,
    ):
        with contextlib.ExitStack() as stack:
            if is_polite:
                stack.enter_context(_polite(served, _LONGEST_S))
            done = subprocess.run(
                ["nice", "-n", "10", *_command(name, served, seconds, patience)],
                capture_output=True,
                text=True,
                timeout=_LONGEST_S,
                check=False,
            )
        lines = [line for line in done.stdout.splitlines() if line.count(" | ") >= 2]
        _, verdict, figures = (
            lines[-1].split(" | ", 2) if lines else (name, "?", done.stderr[-400:])
        )
        is_drained = name.startswith("a11")
        is_alive = is_drained or served.process.poll() is None
        if served.process.poll() is None:
            served.process.terminate()
        has_drained = ended_within(served.process, _DRAIN_S)
        has_drained &= not is_alive or served.process.returncode == 0
    return Outcome(name, verdict, figures, is_alive, has_drained)


def _print(outcome: Outcome, *, is_polite: bool) -> None:
    company = "beside two" if is_polite else "alone"
    state = "" if outcome.is_alive else " | THE SERVER IS GONE"
    state += "" if outcome.has_drained else " | DOES NOT END AT SIGTERM"
    print(f"{outcome.name} | {company} | {outcome.verdict}{state} | {outcome.figures}", flush=True)


def main() -> None:
    """Runs them and prints a line each, then those that do not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="beginnings of names, separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0, help="of an attack, about")
    parser.add_argument("--alone", action="store_true", help="without the two polite tenants")
    parser.add_argument("--bare", action="store_true", help="without Envoy in front")
    parser.add_argument("--json", type=Path, default=Path("build/attacks.json"))
    parser.add_argument("--timelines", type=Path, help="a folder for what the servers note")
    options = parser.parse_args()
    bad = []
    found = []
    chosen = names(options.only)
    if not options.bare and any(map(is_behind_envoy, chosen)):
        try:
            program()
        except FileNotFoundError as error:
            parser.error(f"{error}. Without it: --bare, or others with --only")
    for name in chosen:
        for is_polite in (False,) if options.alone else (False, True):
            rounds = []
            for i in range(options.rounds):
                timeline = None
                if options.timelines:
                    options.timelines.mkdir(parents=True, exist_ok=True)
                    company = "beside" if is_polite else "alone"
                    timeline = options.timelines / f"{name}-{company}-{i}.json"
                outcome = attack(
                    name,
                    seconds=options.seconds,
                    is_polite=is_polite,
                    is_bare=options.bare,
                    timeline=timeline,
                )
                rounds.append(outcome)
                _print(rounds[-1], is_polite=is_polite)
            word = Counter(outcome.is_ok for outcome in rounds).most_common(1)[0][0]
            found.append({"name": name, "is_polite": is_polite, "is_ok": word})
            found[-1]["rounds"] = [outcome.figures for outcome in rounds]
            if not word:
                bad.append(f"{name} {'beside two polite tenants' if is_polite else 'alone'}")
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(f"{len(bad)} do not hold{': ' if bad else ''}{', '.join(bad)}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

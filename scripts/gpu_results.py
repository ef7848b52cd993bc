"""What `scripts/gpu_tables.sh` has taken, by GPU: gpu-tables.json, and gpu-tables.md to read.

Both are in the folder OUT and in build/gpu, so that a call with an empty OUT goes on, and so does a
new machine with the OUT of another one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "gpu"
NAME = "gpu-tables.json"
PAGE = "gpu-tables.md"
IMPORTED = ("gguf", "hypothesis", "pytest", "pytest-asyncio", "pytest-timeout", "pytest-xdist")
"""Of the extra `dev`: what benchmarks and the tests of engines import."""

OF_A_MACHINE = ("build", "peer", "models")
"""Pieces that another machine has to do again."""


def folders() -> tuple[Path, Path]:
    """Returns where results are kept: OUT, and our own folder."""
    return Path(os.environ.get("OUT") or WORK), WORK


def packages(pyproject: Path = ROOT / "pyproject.toml") -> list[str]:
    """Returns requirements of the extra `dev`, as pip takes them, without a space in them."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    wanted = table["project"]["optional-dependencies"]["dev"]
    found = {
        name: text.replace(" ", "")
        for text in wanted
        for name in IMPORTED
        if text.startswith((f"{name}>", f"{name}="))
    }
    assert len(found) == len(IMPORTED), "pyproject.toml has them all"
    return sorted(found.values())


def known() -> dict[str, dict[str, Any]]:
    """Returns the pieces of all earlier calls, by GPU and name."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders():
        for gpu, pieces in json.loads(read(folder / NAME) or "{}").items():
            found.setdefault(gpu, {}).update(pieces)
    return found


def taken(gpu: str) -> list[str]:
    """Returns the names of the pieces that need not be taken again.

    Args:
        gpu: Of this machine.
    """
    built = json.loads(read(WORK / NAME) or "{}").get(gpu, {})
    return [
        name
        for name, piece in known().get(gpu, {}).items()
        if piece["code"] == 0 and (name in built or name not in OF_A_MACHINE)
    ]


def read(path: Path) -> str:
    """Returns a file's text, nothing where there is none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def commit() -> str:
    """Returns the commit that was measured; empty where there is no git."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def record(arguments: argparse.Namespace) -> None:
    """Adds a piece that was just taken, in place of an earlier one of its name."""
    gpu = read(WORK / "gpu.txt").strip()
    rows = read(WORK / f"{arguments.name}.json")
    pieces = known()
    pieces.setdefault(gpu, {})[arguments.name] = {
        "taken": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "code": arguments.code,
        "seconds": arguments.seconds,
        "peer": arguments.peer,
        "commands": read(WORK / f"{arguments.name}.sh").splitlines(),
        "text": read(WORK / f"{arguments.name}.txt"),
        "rows": json.loads(rows) if rows else None,
    }
    for folder in folders():
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in ((NAME, json.dumps(pieces, indent=1)), (PAGE, page(pieces))):
            part = folder / f"{name}.part"
            part.write_text(text, encoding="utf-8")
            part.replace(folder / name)


def page(pieces: Mapping[str, Mapping[str, Any]]) -> str:
    """Returns all pieces to read: where, when, how, and what was printed."""
    lines = []
    for gpu, of_gpu in pieces.items():
        lines += [f"# {gpu}", ""]
        for name, piece in of_gpu.items():
            lines += [f"## {name}", "", f"{piece['taken']}, commit {piece['commit'] or 'unknown'};"]
            peer = "" if name in OF_A_MACHINE else f"llama-server: {piece['peer']}; "
            lines += [f"{peer}exit code {piece['code']} after {piece['seconds']} s", "", "```"]
            lines += [f"$ {command}" for command in piece["commands"]]
            printed = piece["text"].splitlines()
            lines += [*(printed[-5:] if name in OF_A_MACHINE else printed), "```", ""]
    return "\n".join(lines)


def main() -> int:
    """Prints what is asked for, or records a piece."""
    parser = argparse.ArgumentParser(description="results of scripts/gpu_tables.sh")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("packages", help="what to install")
    commands.add_parser("taken", help="the pieces that are done")
    add = commands.add_parser("record", help="add a piece").add_argument
    add("name")
    add("--code", type=int, required=True, help="exit code")
    add("--seconds", type=int, required=True, help="how long it took")
    add("--peer", required=True, help="which llama-server")
    arguments = parser.parse_args()
    if arguments.command == "packages":
        # Without quotes around them, a shell takes < and > in them as what they are.
        sys.stdout.write("\n".join(packages()) + "\n")
    elif arguments.command == "record":
        record(arguments)
    else:
        sys.stdout.writelines(f"{name}\n" for name in taken(read(WORK / "gpu.txt").strip()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

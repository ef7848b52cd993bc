"""Generates the Python stubs of the protos, or with --check tells whether they are up to date.

The one generated copy lies in the SDK, clients/python/drafthouse/v1. grpcio-tools writes the code,
mypy-protobuf the types.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
SDK = ROOT / "clients" / "python"
PATTERN = "drafthouse/v1/*_pb2*.py*"  # .py and .pyi, not __init__.py


def generate(target: Path) -> None:
    """Writes the stubs of every proto below `target`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("drafthouse/v1/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={PROTOS}"]
    command += [f"--{kind}_out={target}" for kind in ("python", "grpc_python")]
    # readable_stubs: names instead of module paths.
    command += [
        f"--mypy_out=readable_stubs,quiet:{target}",
        f"--mypy_grpc_out=readable_stubs,quiet:{target}",
    ]
    environment = {"PATH": str(Path(sys.executable).parent)}  # where protoc-gen-mypy lies
    subprocess.run([*command, *sources], check=True, env=environment)
    # A proto without a service yields an empty service stub.
    services = {
        path.stem
        for path in PROTOS.glob("drafthouse/v1/*.proto")
        if "\nservice " in path.read_text()
    }
    for path in target.glob("drafthouse/v1/*_pb2_grpc.py*"):
        if path.stem.removesuffix("_pb2_grpc") not in services:
            path.unlink()


def names(folder: Path) -> set[str]:
    """Returns the generated files below `folder`, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.glob(PATTERN)}


def stale(fresh: Path) -> list[str]:
    """Returns the files that differ from the fresh ones, are missing, or have no proto any more."""
    wanted, found = names(fresh), names(SDK)
    differing = {
        name for name in wanted & found if not filecmp.cmp(fresh / name, SDK / name, shallow=False)
    }
    return sorted(differing | (wanted ^ found))


def write(fresh: Path) -> None:
    """Copies the fresh stubs into the SDK and removes the ones that no proto yields."""
    for name in names(SDK) - names(fresh):
        (SDK / name).unlink()
    for name in sorted(names(fresh)):
        target = SDK / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((fresh / name).read_bytes())


def main() -> int:
    """Generates or checks; 0 when the stubs are up to date."""
    parser = argparse.ArgumentParser(description="generate the Python stubs of the protos")
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 when the stubs are out of date"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch)
        generate(fresh)
        outdated = stale(fresh)
        if not arguments.check:
            write(fresh)
    if arguments.check and outdated:
        sys.stderr.write(f"generated code is out of date, run `make gen`: {', '.join(outdated)}\n")
        return 1
    sys.stdout.write(f"generated code: {'written' if outdated else 'up to date'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

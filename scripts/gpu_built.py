"""What `scripts/gpu_tables.sh` does with an engine that another machine has built, and packed.

Nothing here needs a package: Python itself is all that is there at first.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (ROOT / "service", ROOT / "clients" / "python", ROOT / "bench")
PROGRAMS = {
    "drafthouse": "drafthouse_server.__main__",
    "drafthouse-bench": "drafthouse_bench.command",
}
"""Modules by the name of the program that calls their `main`."""

LIBRARIES = ("libcublas.so.*", "libcublasLt.so.*", "libcudart.so.*")
"""Of CUDA, which the engine is linked with and which no pack brings."""


def libraries(site: Path, toolkits: Path = Path("/usr/local")) -> list[Path]:
    """Returns folders in which CUDA's libraries are, those of Python's packages first.

    Args:
        site: Where a Python has its packages.
        toolkits: Where CUDA is installed, as cuda or cuda-13.0.
    """
    places = [*site.glob("nvidia/*/lib"), *toolkits.glob("cuda*/lib64")]
    found = {}
    for name in LIBRARIES:
        with_it = [place for place in places if any(place.glob(name))]
        found.update(dict.fromkeys(with_it[:1]))
    return list(found)


def link(built: Path, venv: Path) -> None:
    """Lets an environment import the engine and our sources, and gives it our programs.

    Args:
        built: What was unpacked: site/drafthouse_engine and bin/llama-server.
        venv: The environment.
    """
    (site,) = venv.glob("lib/python3.*/site-packages")
    lines = [*SOURCES, built.resolve() / "site"]
    (site / "drafthouse-built.pth").write_text("".join(f"{line}\n" for line in lines))
    for name, module in PROGRAMS.items():
        program = venv / "bin" / name
        program.write_text(
            f"#!{venv.resolve() / 'bin' / 'python'}\n"
            f"import sys\nfrom {module} import main\nsys.exit(main())\n"
        )
        program.chmod(0o755)


def main() -> int:
    """Does what is asked for; 0."""
    parser = argparse.ArgumentParser(description="an engine that another machine has built")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("libraries", help="folders of CUDA's libraries, as LD_LIBRARY_PATH")
    commands.add_parser("link", help="into .venv").add_argument("built", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "libraries":
        site = Path(sysconfig.get_paths()["purelib"])
        sys.stdout.write(":".join(map(str, libraries(site))) + "\n")
    else:
        link(arguments.built, ROOT / ".venv")
    return 0


if __name__ == "__main__":
    sys.exit(main())

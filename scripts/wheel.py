"""Makes the wheels that are installed without a compiler: `make wheel`, then `make test-wheel`.

The engine is built for each level of x86-64 from v2 on, in a folder of its own below build/wheel,
and the libraries of all levels go into one wheel; `drafthouse_engine.cpu_level` chooses between
them at import. auditwheel, where it is installed, adds the shared libraries that a bare system
lacks (OpenMP's) and finds the oldest C library that it runs with. The licences of all that is
linked in lie in the wheel's dist-info/licenses. The wheel of the SDK is made beside it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "wheel"
DIST = ROOT / "dist"
LEVELS = ("v2", "v3", "v4")
GOMP_NOTICE = Path("/usr/share/doc/libgomp1/copyright")
N_LINES = 30
MACHINES = {"": "", "Nehalem": "v2", "Haswell": "v3"}
"""CPUs that the wheel is tried on under qemu-user, with their level; "" is this one."""


class WheelError(Exception):
    """Says what could not be built, or what the installed wheel does wrong."""


def say(line: str) -> None:
    """Tells the user."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def run(command: list[str], what: str, env: Mapping[str, str] | None = None) -> str:
    """Runs a command. Returns what it said.

    Raises:
        WheelError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=FOLDER)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-N_LINES:])
        raise WheelError(f"{what} failed ({done.returncode}):\n{said}")
    return done.stdout


def build_level(level: str) -> Path:
    """Builds the package for one level of x86-64. Returns its wheel."""
    started_s = time.monotonic()
    folder = FOLDER / level
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--quiet"]
    command += ["--no-build-isolation", "--wheel-dir", str(folder / "out")]
    command += ["-C", f"build-dir={folder / 'cmake'}"]
    command += ["-C", f"cmake.define.DRAFTHOUSE_PORTABLE={level}"]
    env = {name: text for name, text in os.environ.items() if name != "CMAKE_ARGS"}
    run(command, f"building x86-64-{level}", env)
    say(f"x86-64-{level}: built in {time.monotonic() - started_s:.0f} s")
    return next((folder / "out").glob("drafthouse_server-*.whl"))


def read(wheel: Path) -> dict[str, bytes]:
    """Returns the files of a wheel by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


def merged(wheels: Mapping[str, Mapping[str, bytes]]) -> dict[str, bytes]:
    """Returns the files of one wheel: the first one's, and every level's library."""
    files: dict[str, bytes] = {}
    for level, content in wheels.items():
        for name, data in content.items():
            if re.fullmatch(r"drafthouse_engine/_spec\.[^/]*\.so", name):
                files[f"drafthouse_engine/levels/{level}/{Path(name).name}"] = data
            else:
                files.setdefault(name, data)
    return with_licenses(files)


def with_licenses(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns the files with the licences where wheels have them, named in the metadata."""
    info = next(name.rpartition("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    found, names = {}, []
    for name, data in files.items():
        if name.startswith("drafthouse_engine/licenses/"):
            names.append(Path(name).name)
            found[f"{info}/licenses/{names[-1]}"] = data
        else:
            found[name] = data
    head, blank, text = found[f"{info}/METADATA"].decode().partition("\n\n")
    lines = [line for line in head.splitlines() if not line.startswith("Metadata-Version:")]
    lines = ["Metadata-Version: 2.4", *lines, *(f"License-File: {name}" for name in sorted(names))]
    found[f"{info}/METADATA"] = ("\n".join(lines) + blank + text).encode()
    return found


def chosen_level(level: str, names: Iterable[str]) -> str:
    """Returns the level that must be chosen on a CPU: the highest that it and the wheel have.

    Args:
        level: The CPU's; empty is any.
        names: The wheel's files.
    """
    found = {it[1] for name in names if (it := re.match(r"drafthouse_engine/levels/(v\d)/", name))}
    return max((it for it in found if it <= level), default="")


def write(files: Mapping[str, bytes], path: Path) -> None:
    """Writes a wheel, with a RECORD of what is in it."""
    record = next(name for name in files if name.endswith(".dist-info/RECORD"))
    rows = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(files, key=lambda name: (".dist-info/" in name, name)):
            if name == record:
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).rstrip(b"=")
            rows.append(f"{name},sha256={digest.decode()},{len(files[name])}")
            archive.writestr(name, files[name])
        archive.writestr(record, "\n".join([*rows, f"{record},,"]) + "\n")


def repaired(wheel: Path) -> Path:
    """Returns the wheel with the shared libraries that a bare system lacks, in DIST."""
    command = [str(Path(sys.executable).with_name("auditwheel")), "repair", "--strip"]
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    try:
        run([*command[:2], "--wheel-dir", str(DIST), str(wheel)], "auditwheel", env)
    except FileNotFoundError:
        raise WheelError("auditwheel is not installed: pip install '.[wheel]'") from None
    return next(DIST.glob("drafthouse_server-*.whl"))


def make(levels: Iterable[str]) -> None:
    """Builds the wheels into DIST."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    built = {level: read(build_level(level)) for level in levels}
    files = merged(built)
    info = next(name.rpartition("/")[0] for name in files if name.endswith(".dist-info/METADATA"))
    if GOMP_NOTICE.exists():  # auditwheel copies this library
        files[f"{info}/licenses/LICENSE.libgomp"] = GOMP_NOTICE.read_bytes()
        metadata = files[f"{info}/METADATA"].decode()
        first = metadata.index("License-File:")
        named = f"{metadata[:first]}License-File: LICENSE.libgomp\n{metadata[first:]}"
        files[f"{info}/METADATA"] = named.encode()
    else:
        say(f"{GOMP_NOTICE} is missing: add the licence of OpenMP's library, which is copied")
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    name = next((FOLDER / next(iter(built)) / "out").glob("drafthouse_server-*.whl")).name
    write(files, FOLDER / name)
    wheel = repaired(FOLDER / name)
    pip = [sys.executable, "-m", "pip", "wheel", str(ROOT / "clients" / "python"), "--no-deps"]
    run([*pip, "--quiet", "--no-build-isolation", "--wheel-dir", str(DIST)], "the SDK's wheel")
    for path in (wheel, *DIST.glob("drafthouse-*.whl")):
        say(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB")


PROBE = """
import sys
import drafthouse_engine
from drafthouse_engine import _spec
model = drafthouse_engine.Model(sys.argv[1])
text = drafthouse_engine.generate(
    model, "def add(a, b):", method="mtp", n_tokens=16, n_draft=2, n_threads=1)
print(_spec.__file__.split("/levels/")[1].split("/")[0], len(text.tokens))
"""


SERVER_PROBE = """
import re, subprocess, sys
import drafthouse
command = [sys.argv[1], "serve", "--model", sys.argv[2], "--port", "0", "--parallel", "1"]
server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
try:
    said = (re.match("listening at (.*)", line) for line in server.stdout)
    address = next(found[1] for found in said if found)
    with drafthouse.Client(address) as client:
        texts = [str(chunk) for chunk in client.generate("def add(a, b):", max_output_tokens=16)]
    print(sum(map(len, texts)))
finally:
    server.terminate()
    server.wait(60)
"""


def cpus(*, needs_emulator: bool) -> dict[str, str]:
    """Returns the CPUs that can be tried here, with their level.

    Args:
        needs_emulator: Whether it is an error that only this one can.

    Raises:
        WheelError: qemu-user is not installed, and that is an error.
    """
    if shutil.which("qemu-x86_64"):
        return MACHINES
    missing = "qemu-user is not installed (make test-deps)"
    others = " and ".join(filter(None, MACHINES))
    if needs_emulator:
        raise WheelError(f"{missing}, and the wheels must be tried on {others}, too")
    say(f"{missing}: the wheels were not tried on {others}, on this CPU alone")
    return {"": ""}


def test(*, needs_emulator: bool) -> None:
    """Installs the wheels into an empty environment and generates there, on several CPUs.

    Args:
        needs_emulator: Whether it is an error that only this CPU can be tried.

    Raises:
        WheelError: there are no wheels, they do not work, or qemu-user is needed and missing.
    """
    machines = cpus(needs_emulator=needs_emulator)
    wheels = [str(path) for path in sorted(DIST.glob("*.whl"))]
    if len(wheels) != 2:
        raise WheelError("dist/ has no wheels: make wheel")
    venv = FOLDER / "venv"
    shutil.rmtree(venv, ignore_errors=True)
    FOLDER.mkdir(parents=True, exist_ok=True)
    run([sys.executable, "-m", "venv", str(venv)], "making an environment")
    python = str(venv / "bin" / "python")
    run([python, "-m", "pip", "install", "--quiet", *wheels], "installing the wheels")
    model = str(ROOT / "models" / "tiny-mimo2-f16.gguf")
    env = {name: text for name, text in os.environ.items() if not name.startswith("DRAFTHOUSE_")}
    doctor = [str(venv / "bin" / "drafthouse"), "doctor", model, "--json", "--port", "0"]
    run(doctor, "drafthouse doctor of the wheel", env)
    served = run([python, "-I", "-c", SERVER_PROBE, doctor[0], model], "a server of the wheel", env)
    if int(served.split()[-1]) < 1:
        raise WheelError("a server of the wheel generated nothing")
    with zipfile.ZipFile(next(DIST.glob("drafthouse_server-*.whl"))) as archive:
        names = archive.namelist()
    for cpu, level in machines.items():
        check_machine(cpu, chosen_level(level, names), python, model, env)
    say("the wheels work")


def check_machine(cpu: str, level: str, python: str, model: str, env: Mapping[str, str]) -> None:
    """Generates with the installed wheel, on this CPU or on one that qemu is."""
    started_s = time.monotonic()
    emulator = ["qemu-x86_64", "-cpu", cpu] if cpu else []
    # -I: what stands beside this file must not be found instead of what is installed.
    said = run([*emulator, python, "-I", "-c", PROBE, model], cpu or "this CPU", env)
    chosen, n_tokens = said.split()[-2:]
    if (level and chosen != level) or int(n_tokens) < 1:
        wanted = f"expected {level or 'any level'} and a token at least"
        raise WheelError(f"{cpu or 'this CPU'}: took {chosen}, wrote {n_tokens} tokens; {wanted}")
    n_s = time.monotonic() - started_s
    say(f"{cpu or 'this CPU'}: {chosen}, {n_tokens} tokens in {n_s:.0f} s")


def main() -> int:
    """Makes or tries the wheels; 0, or 1 after what failed."""
    parser = argparse.ArgumentParser(description="wheels for any x86-64-v2 machine")
    parser.add_argument("--test", action="store_true", help="try what `make wheel` has made")
    parser.add_argument(
        "--emulated", action="store_true", help="fail without qemu-user, as with CI set"
    )
    parser.add_argument("--levels", default=",".join(LEVELS), help="v2,v3,v4: those to build")
    arguments = parser.parse_args()
    try:
        if arguments.test:
            test(needs_emulator=arguments.emulated or bool(os.environ.get("CI")))
        else:
            levels = arguments.levels.split(",")
            if not set(levels) <= set(LEVELS):
                parser.error(f"--levels: expected some of {','.join(LEVELS)}")
            make(levels)
    except WheelError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

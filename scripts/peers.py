"""Builds the peer of the benchmarks: llama-server of the pinned source, into build/peers.

`make archs` has upstream's own test program built beside it, which writes a model of nearly every
architecture.

The peer is stock: our patches are taken back from a copy of the source that the engine is built
from, without fuzz, so what is left is the archive's own bytes. One patch is put back (KEPT):
without it Debian 12's compiler makes a llama-server that ends at its first step on a processor with
AMX. Same compiler, same build type, same CPU flags as the engine; no web interface, no HTTPS,
nothing is downloaded. A build that is there and fits the source is kept; one that was stopped goes
on where it stopped.

With DRAFTHOUSE_LLAMA_CPP the peer is built from that checkout as it is, as the engine is.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PEERS = ROOT / "build" / "peers"
SERVER = PEERS / "cmake" / "bin" / "llama-server"  # where llama.cpp puts programs
SOURCE = PEERS / "source"
BUILD = PEERS / "cmake"
STAMP = PEERS / "built.stamp"
LOG = PEERS / "build.log"
N_LOG_LINES = 15
KEPT = ("0019-amx-configuration.patch",)
"""Patches that the peer has, too: where it would not run at all."""
ARCHS = "test-llama-archs"
"""Upstream's program that writes models of all architectures."""

sys.path.insert(0, str(ROOT / "cext"))

import fetch_llama_cpp as pinned  # noqa: E402  the one module that knows the pinned source
import patch_files  # noqa: E402  # the folder is on the path since the lines above

OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",
    "-DGGML_NATIVE=ON",
    "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TOOLS=ON",
    "-DLLAMA_BUILD_SERVER=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
)


class PeerError(Exception):
    """Says in one sentence why there is no peer."""


def state(source: str) -> str:
    """Returns a short hash of all that decides what is built.

    Our patches are not in it: they come off again, but for those that are kept.
    """
    digest = hashlib.sha256(source.encode())
    for patch in _kept(pinned.patches()):
        digest.update(patch.read_bytes() + b"\0")
    for text in (*OPTIONS, os.environ.get("CMAKE_ARGS", ""), os.environ.get("CXX", "")):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:16]


def _kept(patches: list[Path]) -> list[Path]:
    return [patch for patch in patches if patch.name in KEPT]


def make_stock(source: Path, patches: list[Path]) -> None:
    """Copies the source and takes our patches back, last first, but for those that are kept.

    Raises:
        PeerError: a patch does not come off cleanly.
    """
    part = SOURCE.with_name("source.part")
    shutil.rmtree(part, ignore_errors=True)
    shutil.copytree(source, part, symlinks=True)
    try:
        patch_files.apply(part, patches, is_reverse=True)
        patch_files.apply(part, _kept(patches))
    except patch_files.PatchError as error:
        raise PeerError(f"Our patches cannot be taken back: {error}") from error
    shutil.rmtree(SOURCE, ignore_errors=True)
    part.rename(SOURCE)


def version() -> str:
    """Returns the pinned version of llama.cpp."""
    return str(pinned.read_lock().version)


def program(name: str) -> Path:
    """Returns where llama.cpp's build puts a program."""
    return SERVER.with_name(name)


def build(source: Path, version: str, name: str = SERVER.name) -> None:
    """Configures and compiles a program, as a background job of the machine.

    Raises:
        PeerError: a command failed; the end of its output has been shown.
    """
    number = version.removeprefix("b")
    configure = ["cmake", "-S", str(source), "-B", str(BUILD), *OPTIONS]
    # Otherwise llama.cpp asks git and reports the commit of whatever repository surrounds it.
    configure += [f"-DLLAMA_BUILD_NUMBER={number}", f"-DLLAMA_BUILD_COMMIT={version}"]
    if name != SERVER.name:  # it alters no object of the server
        configure += ["-DLLAMA_BUILD_TESTS=ON"]
    configure += os.environ.get("CMAKE_ARGS", "").split()
    if shutil.which("ninja") and not (BUILD / "Makefile").exists():
        configure += ["-G", "Ninja"]
    n_jobs = os.environ.get("JOBS", "2")
    compile_ = ["nice", "cmake", "--build", str(BUILD), "--target", name]
    for command in (configure, [*compile_, "--parallel", n_jobs]):
        if not shutil.which(command[0]):
            raise PeerError(f"`{command[0]}` is missing: apt-get install cmake g++.")
        with LOG.open("ab") as log:
            run = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        if run.returncode:
            lines = LOG.read_text(errors="replace").splitlines()[-N_LOG_LINES:]
            sys.stderr.write("\n".join(lines) + "\n")
            log_name = LOG.relative_to(ROOT)
            raise PeerError(f"{name} cannot be built; the whole log is in {log_name}.")


def make_program(name: str) -> Path:
    """Builds another program of the peer's source, unless it is there, and returns its path.

    Raises:
        PeerError: it cannot be built.
        pinned.FetchError: the source cannot be fetched.
    """
    make_peer()
    path = program(name)
    if not path.exists() or path.stat().st_mtime < STAMP.stat().st_mtime:
        pinned.say(f"building {name} …")
        build(pinned.own_checkout() or SOURCE, pinned.read_lock().version, name)
        path.touch()
    return path


def make_peer() -> str:
    """Returns what there is now, in words; builds what is missing.

    Raises:
        PeerError: it cannot be built.
        pinned.FetchError: the source cannot be fetched.
    """
    started_s = time.monotonic()
    own = pinned.own_checkout()
    is_own = own is not None
    wanted = state(str(own or pinned.read_lock().sha256))
    PEERS.mkdir(parents=True, exist_ok=True)
    if SERVER.exists() and STAMP.exists() and STAMP.read_text().strip() == wanted:
        return "there"
    LOG.unlink(missing_ok=True)
    pinned.say(f"building llama-server from {'your checkout' if is_own else 'the stock source'} …")
    pinned.say("about four minutes on two free cores, in the background's priority; JOBS=2")
    source_stamp = PEERS / "source.stamp"
    if not is_own and not (source_stamp.exists() and source_stamp.read_text() == wanted):
        make_stock(pinned.source_path(), pinned.patches())
        source_stamp.write_text(wanted)
    build(own or SOURCE, pinned.read_lock().version)
    if not SERVER.exists():
        raise PeerError(f"The build made no {SERVER.relative_to(ROOT)}.")
    STAMP.write_text(wanted + "\n")
    return f"built in {time.monotonic() - started_s:.0f} s"


def main() -> int:
    """Makes the peer; 0 or, after one sentence on standard error, 1."""
    try:
        how = make_peer()
    except (PeerError, pinned.FetchError) as error:
        pinned.say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        pinned.say("stopped; what is compiled is kept.")
        return 130
    pinned.say(
        f"llama-server {pinned.read_lock().version}, stock: {SERVER.relative_to(ROOT)} ({how})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

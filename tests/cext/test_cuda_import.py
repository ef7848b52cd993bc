"""An import, chats and text workers touch no device, with an extension that has CUDA in it.

A device is touched by a call into the driver's library, and `cuInit` or what finds the others'
places comes before any. So a library of that name is put where it is looked for first, which leaves
a mark when one of these is called; besides, no file of a device is open in a process. That the
library is loaded says nothing: cuBLAS 13 does so, and looks up names in it, as soon as it is loaded
itself. Neither a GPU nor a driver is needed.
"""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.hand import DENSE, MODELS

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "build" / "cuda" / "site"

pytestmark = pytest.mark.model

DRIVER = """
#include <fcntl.h>
static int mark(void) {
    open(MARK, O_CREAT | O_WRONLY, 0600);
    return 100;  // no device
}
int cuInit() { return mark(); }
int cuDriverGetVersion() { return mark(); }
int cuDeviceGetCount() { return mark(); }
int cuGetExportTable() { return mark(); }
int cuGetProcAddress() { return mark(); }
int cuGetProcAddress_v2() { return mark(); }
"""

TOUCHES = """
import asyncio, os, sys
from pathlib import Path

mark, model = Path(sys.argv[1]), sys.argv[2]
before = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
import drafthouse_engine
from drafthouse_server.engine.text_jobs import TextJob
from drafthouse_server.engine.text_process import TextProcess

def family():
    "This process and all below it."
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found

def open_files(pid):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(fd)
        except OSError:
            continue

def check(n_processes):
    pids = family()
    assert len(pids) >= n_processes, pids
    for pid in pids:
        try:
            mapped = Path(f"/proc/{pid}/maps").read_text()
        except PermissionError:  # a worker, into which root alone can look; the mark tells
            assert pid != os.getpid() and os.geteuid() != 0
            continue
        assert "libnvidia" not in mapped, mapped  # what the driver's library loads when it begins
        held = [name for name in open_files(pid) if name.startswith(("/dev/nvidia", "/dev/dri"))]
        assert not held, held
    assert not mark.exists()
    now = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    assert now == before  # CUDA_VISIBLE_DEVICES among them

async def work():
    worker = TextProcess(model)
    await worker.start()
    for job in (TextJob(text="def f(x):"), TextJob(messages=[("user", "def f(x):")])):
        assert (await worker.ask(job, 10.0)).tokens
    check(2)  # it formats chats itself
    await worker.end()

check(1)
with drafthouse_engine.Model(model, vocab_only=True) as vocabulary:
    assert vocabulary.format_chat([("user", "def f(x):")])
    check(2)
facts = drafthouse_engine.build_facts()
asyncio.run(work())
check(1)
drafthouse_engine.list_devices()
print("CUDA" in facts["backends"].split(), mark.exists())
"""


def cuda_folder() -> Path:
    """Returns where the extension with CUDA is; skips without one."""
    if not (CUDA / "drafthouse_engine").is_dir():
        pytest.skip("no extension with CUDA in build/cuda: `make cuda`, over an hour on two cores")
    if not list(CUDA.glob(f"drafthouse_engine/_spec.{sys.implementation.cache_tag}-*")):
        pytest.skip("the extension in build/cuda is for another Python")
    return CUDA


@pytest.mark.parametrize("build", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_import_chats_and_text_workers_touch_no_device(tmp_path: Path, build: str) -> None:
    mark = tmp_path / "called"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "no C compiler: apt-get install gcc"  # the engine was built with one
    (tmp_path / "driver.c").write_text(DRIVER)
    # nodelete: a runtime that finds nothing of use in it would unmap it again.
    flags = ["-shared", "-fPIC", "-Wl,-z,nodelete", f'-DMARK="{mark}"']
    command = [compiler, *flags, "driver.c", "-o", "libcuda.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True)
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": str(tmp_path)}
    python = sys.executable
    if build == "cuda":
        # Not the environment's own interpreter: an editable installation would be found first.
        python = str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info[1]}")
        environment["PYTHONPATH"] = os.pathsep.join([str(cuda_folder()), *site.getsitepackages()])
    done = subprocess.run(
        [python, "-c", TOUCHES, str(mark), str(MODELS / DENSE)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # A device is asked for where somebody wants to know of devices: the mark can be left.
    assert done.stdout.split()[-2:] == (["True", "True"] if build == "cuda" else ["False", "False"])

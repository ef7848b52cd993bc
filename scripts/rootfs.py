"""Runs the steps of deploy/Dockerfile without Docker, then the server that they have made.

Each stage is a Debian root made by debootstrap, under build/rootfs. The server is started as the
image's user, in a root that is read-only but for /tmp, with keys and a certificate mounted, as
deploy/compose.yaml does; then a client asks it for tokens by TLS, and SIGTERM ends it.

A step that is done is kept until it, or a step or a file before it, changes; `--fresh` begins anew.
Needs root, debootstrap and util-linux. `make rootfs` calls it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
ROOTS = ROOT / "build" / "rootfs"
# What this machine needs to reach its registries is lent to the steps, and is not in the result.
LENT = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")
LENT_VARIABLES = re.compile(r"(PIP_\w+|https?_proxy|no_proxy)", re.IGNORECASE)
START_S = 120


class RootfsError(Exception):
    """Says in one sentence what does not work."""


@dataclass
class Step:
    """One instruction of a Dockerfile."""

    word: str
    """RUN, COPY, …"""
    text: str
    """What follows, in one line."""


@dataclass
class Stage:
    """A stage of a Dockerfile while its steps are run."""

    name: str
    """As FROM says, or its number."""
    suite: str
    """Debian's release."""
    steps: list[Step] = field(default_factory=list)
    """After FROM."""
    environment: dict[str, str] = field(default_factory=dict)
    """As ENV says, so far."""
    folder: str = "/"
    """As WORKDIR says."""
    user: str = "0:0"
    """As USER says."""
    command: dict[str, list[str]] = field(default_factory=dict)
    """ENTRYPOINT and CMD."""

    @property
    def root(self) -> Path:
        """Where its files are."""
        return ROOTS / self.name


def steps_of(text: str) -> Iterator[Step]:
    """Yields the instructions of a Dockerfile."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    for line in filter(str.strip, whole.splitlines()):
        word, _, rest = line.partition(" ")
        yield Step(word.upper(), rest.strip())


def stages_of(text: str) -> list[Stage]:
    """Returns the stages of a Dockerfile.

    Raises:
        RootfsError: it is based on something else than Debian.
    """
    stages: list[Stage] = []
    for step in steps_of(text):
        if step.word != "FROM":
            stages[-1].steps.append(step)
            continue
        base, _, name = step.text.partition(" AS ")
        found = re.fullmatch(r"debian:(\w+)-slim", base)
        if not found:
            raise RootfsError(f"FROM {base}: this knows debian:RELEASE-slim alone.")
        stages.append(Stage(name or str(len(stages)), found[1]))
    return stages


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Runs a command.

    Raises:
        RootfsError: it failed.
    """
    done = subprocess.run(command, env=env, check=False)
    if done.returncode:
        raise RootfsError(f"{shlex.join(command)[:200]} ended with {done.returncode}.")


def base_of(suite: str) -> Path:
    """Returns a root with nothing but Debian's smallest set of packages, made once."""
    base = ROOTS / f"base-{suite}"
    if not (base / "etc" / "debian_version").exists():
        shutil.rmtree(base, ignore_errors=True)
        print(f"== debootstrap {suite}", flush=True)
        run("debootstrap", "--variant=minbase", suite, str(base))
    return base


def program(name: str) -> str:
    """Returns where a program of this machine is, which the image's PATH may not have.

    Raises:
        RootfsError: it is not there.
    """
    # Debian has chroot in a folder that is in the PATH of root's login shells alone.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    found = shutil.which(name, path=path)
    if found is None:
        raise RootfsError(f"{name} is not installed, or in no folder of PATH.")
    return found


def inside(stage: Stage, command: str) -> list[str]:
    """Returns the command line that runs a shell command in a stage's root."""
    root = shlex.quote(str(stage.root))
    script = (
        f"mount -t proc proc {root}/proc && mount --rbind /dev {root}/dev"
        f" && exec {program('chroot')} {root}"
        f" /bin/sh -ec {shlex.quote(f'cd {stage.folder}; {command}')}"
    )
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-ec", script]


def digest_of(sources: list[Path]) -> str:
    """Returns a hash of files and what is in folders, without what Python leaves there."""
    found = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*") if source.is_dir() else [source]):
            if path.is_file() and path.suffix != ".so" and "__pycache__" not in path.parts:
                found.update(str(path).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def sources_of(step: Step) -> tuple[list[Path], str]:
    """Returns what COPY takes and where it goes."""
    *names, target = step.text.split()
    origin = ROOT
    if names[0].startswith("--from="):
        origin = ROOTS / names.pop(0).removeprefix("--from=")
    return [origin / name.lstrip("/") for name in names], target


def copy(stage: Stage, step: Step) -> None:
    """Runs COPY, which gives a folder's contents to the target."""
    sources, target = sources_of(step)
    place = stage.root / str(Path(stage.folder) / target).lstrip("/")
    for source in sources:
        if source.is_dir():
            # What a stage has made is copied whole; of the checkout not what Python leaves there.
            is_made = step.text.startswith("--from=")
            hidden = None if is_made else shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(source, place, symlinks=True, dirs_exist_ok=True, ignore=hidden)
        else:
            is_folder = target.endswith("/") or len(sources) > 1
            aim = place / source.name if is_folder else place
            aim.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, aim)


def shell(stage: Stage, step: Step) -> None:
    """Runs RUN, with what this machine needs to reach its registries."""
    lent = []
    for name in LENT:
        source, place = Path(name), stage.root / name.lstrip("/")
        if source.exists():
            kept = place.read_bytes() if place.exists() else None
            place.parent.mkdir(parents=True, exist_ok=True)
            place.unlink(missing_ok=True)
            shutil.copy(source, place)
            lent.append((place, kept))
    env = {name: text for name, text in os.environ.items() if LENT_VARIABLES.fullmatch(name)}
    for name in ("CMAKE_BUILD_PARALLEL_LEVEL", "TERM"):
        if name in os.environ:
            env[name] = os.environ[name]
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    try:
        env |= {"PATH": path, "HOME": "/root", "DEBIAN_FRONTEND": "noninteractive"}
        run(*inside(stage, step.text), env=env | stage.environment)
    finally:
        for place, kept in lent:
            place.unlink(missing_ok=True)
            if kept is not None:
                place.write_bytes(kept)


def perform(stage: Stage, step: Step) -> None:
    """Runs a step that changes files; others change the stage itself."""
    if step.word == "RUN":
        shell(stage, step)
    elif step.word == "COPY":
        copy(stage, step)


def note(stage: Stage, step: Step) -> None:
    """Takes what a step says of the steps after it, and of the image.

    Raises:
        RootfsError: there is no such step.
    """
    if step.word == "ENV":
        stage.environment |= dict(pair.split("=", 1) for pair in shlex.split(step.text))
    elif step.word == "WORKDIR":
        stage.folder = step.text
        (stage.root / step.text.lstrip("/")).mkdir(parents=True, exist_ok=True)
    elif step.word == "USER":
        stage.user = step.text
    elif step.word in {"ENTRYPOINT", "CMD"}:
        stage.command[step.word] = json.loads(step.text)
    elif step.word not in {"RUN", "COPY", "EXPOSE", "STOPSIGNAL"}:
        raise RootfsError(f"{step.word} is not known here; add it to scripts/rootfs.py.")


def build(stage: Stage) -> None:
    """Runs the steps of a stage that are not done."""
    done_file = ROOTS / f"{stage.name}.done"
    done = done_file.read_text("utf-8").split() if done_file.exists() else []
    if not stage.root.exists() or not done:
        shutil.rmtree(stage.root, ignore_errors=True)
        run("cp", "-a", str(base_of(stage.suite)), str(stage.root))
    before, kept = stage.suite, []
    for step in stage.steps:
        content = digest_of(sources_of(step)[0]) if step.word == "COPY" else ""
        before = hashlib.sha256(f"{before} {step} {content}".encode()).hexdigest()
        note(stage, step)
        kept.append(before)
        if done[: len(kept)] == kept:
            continue
        print(f"== {stage.name}: {step.word} {step.text[:90]}", flush=True)
        perform(stage, step)
        done_file.write_text("\n".join(kept), "utf-8")


# The server.


def write_secrets(folder: Path, user: str) -> str:
    """Makes a key and a certificate that the image's user can read; returns the key."""
    folder.mkdir(exist_ok=True)
    key = os.urandom(20).hex()
    (folder / "keys").write_text(f"acme:{key}\n", "utf-8")
    (folder / "key").write_text(key, "utf-8")
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=rootfs"),
            *("-addext", "subjectAltName=DNS:localhost"),
            *("-keyout", str(folder / "server.key"), "-out", str(folder / "server.crt")),
        ],
        capture_output=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        raise RootfsError(f"openssl made no certificate: {made.stderr.decode()[-200:]}")
    group = int(user.partition(":")[2])
    for path in folder.iterdir():
        os.chown(path, 0, group)
        path.chmod(0o640)
    return key


def start(stage: Stage, secrets: Path, port: int) -> subprocess.Popen[bytes]:
    """Starts the image's program, read-only, as its user."""
    root = shlex.quote(str(stage.root))
    tmp = f"{root}/tmp"  # noqa: S108  # of that root
    (stage.root / "etc" / "drafthouse").mkdir(exist_ok=True)
    arguments = [
        *stage.command["ENTRYPOINT"],
        *stage.command["CMD"],
        f"--port={port}",
        "--api-keys-file=/etc/drafthouse/keys",
        "--ssl-cert-file=/etc/drafthouse/server.crt",
        "--ssl-key-file=/etc/drafthouse/server.key",
    ]
    script = (
        f"mount --bind {root} {root} && mount -o remount,bind,ro {root}"
        f" && mount -t tmpfs -o mode=1777 tmp {tmp} && mount -t proc proc {root}/proc"
        f" && mount --bind -o ro {shlex.quote(str(secrets))} {root}/etc/drafthouse"
        f" && mount -t tmpfs -o mode=755 dev {root}/dev"
        f" && for one in null zero urandom random; do touch {root}/dev/$one;"
        f" mount --bind /dev/$one {root}/dev/$one; done"
        f" && exec {program('chroot')} --userspec={stage.user} {root}"
        f" /usr/bin/setpriv --no-new-privs {shlex.join(arguments)}"
    )
    command = ["unshare", "--mount", "/bin/sh", "-ec", script]
    return subprocess.Popen(command, env={"HOME": "/nonexistent"} | stage.environment)


def wait_for(process: subprocess.Popen[bytes], port: int) -> None:
    """Waits until the server listens.

    Raises:
        RootfsError: it has ended, or takes too long.
    """
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        if process.poll() is not None:
            raise RootfsError(f"the server ended with {process.returncode}, see above.")
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RootfsError(f"the server did not listen within {START_S} s.")


def check_fence(process: subprocess.Popen[bytes], user: str) -> None:
    """Checks that the server is the image's user, and that its root is read-only.

    Raises:
        RootfsError: it is not.
    """
    proc = Path(f"/proc/{process.pid}")
    owner = proc.stat()
    found = f"{owner.st_uid}:{owner.st_gid}"
    if found != user:
        raise RootfsError(f"the server runs as {found} and not as {user}.")
    if "\nNoNewPrivs:\t1\n" not in (proc / "status").read_text("utf-8"):
        raise RootfsError("the server may gain privileges.")
    try:
        (proc / "root" / "written").touch()
    except OSError:
        return
    raise RootfsError("the server's root can be written.")


def ask(secrets: Path, port: int) -> str:
    """Returns what the server generates for this checkout's client."""
    client = Path(sys.executable).parent / "drafthouse"
    command = [str(client), "generate", "def parse(", "--max-tokens=20", "--temperature=0"]
    command += [f"--server=localhost:{port}", f"--ca-file={secrets / 'server.crt'}"]
    done = subprocess.run(
        [*command, f"--api-key-file={secrets / 'key'}"], capture_output=True, text=True, check=False
    )
    if done.returncode or not done.stdout.strip():
        raise RootfsError(f"the client got no text: {done.stderr.strip()}")
    return done.stdout


def serve(stage: Stage) -> None:
    """Starts the server, asks it, ends it.

    Raises:
        RootfsError: something of that does not work.
    """
    secrets = ROOTS / "secrets"
    write_secrets(secrets, stage.user)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    process = start(stage, secrets, port)
    try:
        wait_for(process, port)
        check_fence(process, stage.user)
        print(f"== it answers: {ask(secrets, port)!r}", flush=True)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        process.kill()
        process.wait()
    if code:
        raise RootfsError(f"the server ended with {code} after SIGTERM.")


def size_of(root: Path) -> int:
    """Returns the bytes of all files of a root."""
    return sum(s.st_size for p in root.rglob("*") if stat.S_ISREG((s := p.lstat()).st_mode))


def main() -> int:
    """Builds and serves; 0 or, after one sentence on standard error, 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    arguments = parser.parse_args()
    try:
        if os.geteuid() != 0:
            raise RootfsError("This needs root, as debootstrap and mount do.")
        if not shutil.which("debootstrap"):
            raise RootfsError("This needs debootstrap: apt-get install debootstrap.")
        if arguments.fresh:
            shutil.rmtree(ROOTS, ignore_errors=True)
        ROOTS.mkdir(parents=True, exist_ok=True)
        stages = stages_of(DOCKERFILE.read_text("utf-8"))
        for stage in stages:
            build(stage)
        print(f"== the root has {size_of(stages[-1].root) / 1e6:.0f} MB", flush=True)
        serve(stages[-1])
    except RootfsError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    print("rootfs: the server answered from a read-only root, as its own user")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What lies in deploy/ beside Envoy's configuration: its names are right, and systemd takes it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from scripts import rootfs
from scripts.rootfs import DOCKERFILE, note, sources_of, stages_of

from drafthouse._errors import _DETAILS_KEY, _USAGE_KEY
from drafthouse_server.config import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


def test_the_dockerfile_has_only_steps_that_rootfs_runs_and_copies_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripts.rootfs.ROOTS", tmp_path)
    build, image = stages_of(DOCKERFILE.read_text("utf-8"))
    for stage in (build, image):
        for step in stage.steps:
            note(stage, step)
            if step.word == "COPY" and not step.text.startswith("--from=build"):
                assert all(source.exists() for source in sources_of(step)[0]), step
    assert image.user == "65532:65532"
    assert image.command["CMD"][0] == "serve"
    assert not [step for step in image.steps if "g++" in step.text]
    # With the drivers of what several servers share; `make rootfs` installs them.
    assert [step for step in build.steps if "'.[postgresql,redis]'" in step.text]
    # The authorities that sign certificates of databases elsewhere (sslmode=verify-full, rediss://).
    assert [step for step in image.steps if re.search(r"install .*\bca-certificates\b", step.text)]
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    copied = {
        str(source.relative_to(ROOT))
        for stage in (build, image)
        for step in stage.steps
        if step.word == "COPY" and not step.text.startswith("--from=")
        for source in sources_of(step)[0]
    }
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_rootfs_starts_the_server_by_the_images_path_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That PATH has no /usr/sbin, where Debian has chroot: the server was never started."""
    started = list[tuple[list[str], dict[str, str]]]()

    def note_start(command: list[str], env: dict[str, str]) -> None:
        started.append((command, env))

    monkeypatch.setattr("scripts.rootfs.ROOTS", tmp_path)
    _, image = stages_of(DOCKERFILE.read_text("utf-8"))
    for step in image.steps:
        note(image, step)
    (image.root / "etc").mkdir(parents=True)
    monkeypatch.setattr(subprocess, "Popen", note_start)
    rootfs.start(image, tmp_path, 50051)
    ((command, environment),) = started
    shell = {"for", "do", "done", "exec"}
    parts = [part.split() for part in re.split(r"&&|;|\bdo\b", command[-1])]
    programs = {next((word for word in part if word not in shell), "") for part in parts}
    programs -= {"", "one"}  # of `for one in …`
    assert {Path(program).name for program in programs} == {"mount", "touch", "chroot"}
    for program in programs:
        assert shutil.which(program, path=environment["PATH"]), program


def test_settings_that_deploy_names_are_settings() -> None:
    flags = {setting.flag for setting in SETTINGS.values()} | {"--config"}
    variables = {setting.variable for setting in SETTINGS.values()}
    for path in (DEPLOY / "compose.yaml", DEPLOY / "drafthouse.service", DEPLOY / "Dockerfile"):
        text = path.read_text("utf-8")
        given = re.findall(r"(?:- |serve |\")(--[a-z][a-z-]+)", text)
        assert set(given) <= flags, path
        assert set(re.findall(r"\bDRAFTHOUSE_[A-Z_]+", text)) - {"DRAFTHOUSE_PORTABLE"} <= variables


def mounts(block: str) -> dict[str, str]:
    """Returns where a service of compose.yaml has the folders and files of secrets/."""
    return dict(re.findall(r"- \./secrets/([^:\s]+):([^:\s]+):ro\n", block))


def test_certificates_and_keys_are_mounted_by_their_folders() -> None:
    """A file that is replaced by renaming stays the old one where it was mounted by itself."""
    server, front = (DEPLOY / "compose.yaml").read_text("utf-8").split("\nservices:\n")
    named = re.findall(r"(?:--[a-z-]+=|ca_file=\")(/etc/drafthouse/[\w.]+)", server)
    assert {Path(path).name for path in named} == {"keys", "server.crt", "server.key", "ca.crt"}
    envoy = (DEPLOY / "envoy_certificate.yaml").read_text("utf-8")
    shown = re.findall(r"filename: ([^ }]+)", envoy)
    assert {Path(path).name for path in shown} == {"tls.crt", "tls.key"}
    for block, paths in ((server, named), (front, shown)):
        mounted = mounts(block)
        assert {str(Path(path).parent) for path in paths} <= set(mounted.values())
        assert not set(paths) & set(mounted.values())
    (watched,) = re.findall(r"watched_directory: { path: (\S+) }", envoy)
    assert mounts(front)["tls"] == watched


def test_envoy_begins_as_its_own_user() -> None:
    """As root its image becomes that user at first, for which it has no right: it did not start."""
    _, front = (DEPLOY / "compose.yaml").read_text("utf-8").split("\n  front:\n")
    assert "\n    cap_drop: [ALL]\n" in front
    assert re.search(r'\n    user: "101:101"', front)


def test_the_unit_may_write_where_the_documentation_has_files() -> None:
    """Its file system was read-only, and the documentation's store could not be opened."""
    pages = "".join(page.read_text("utf-8") for page in (ROOT / "docs").glob("*.md"))
    unit = (DEPLOY / "drafthouse.service").read_text("utf-8").splitlines()
    folders = {"/var/lib/drafthouse/": "StateDirectory", "/run/drafthouse/": "RuntimeDirectory"}
    for folder, setting in folders.items():
        assert folder in pages
        assert f"{setting}=drafthouse" in unit


def test_the_unit_tries_again_for_as_long_as_it_takes() -> None:
    """After five starts in 10 s systemd gave up, while a store was away for a minute."""
    unit = (DEPLOY / "drafthouse.service").read_text("utf-8")
    head, _, service = unit.partition("[Service]\n")
    assert "\nStartLimitIntervalSec=0\n" in head
    assert "\nRestart=on-failure\n" in service
    # A text worker may be ended for want of memory; by default systemd ended the server then.
    assert "\nOOMPolicy=continue\n" in service
    # A hangup is a success for systemd, as who wants certificates read again may send one.
    assert "\nRestartForceExitStatus=SIGHUP\n" in service


def test_the_unit_lets_text_workers_take_calls_away_from_themselves() -> None:
    """@system-service of systemd 252 lacks seccomp: workers kept all calls, by a warning."""
    unit = (DEPLOY / "drafthouse.service").read_text("utf-8").splitlines()
    (allowed,) = [line for line in unit if line.startswith("SystemCallFilter=@")]
    assert "seccomp" in allowed.split()


def test_browsers_may_read_all_that_ends_a_stream() -> None:
    """Of a stream that ends before its first message trailers come as headers."""
    text = (DEPLOY / "envoy.yaml").read_text("utf-8")
    exposed = re.findall(r"expose_headers: (\S+)", text)
    assert len(exposed) == 1
    assert {"grpc-status", "grpc-message", _DETAILS_KEY, _USAGE_KEY} <= set(exposed[0].split(","))


def systemd_analyze(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs systemd-analyze; without it the test is skipped, or fails where CI is set."""
    if shutil.which("systemd-analyze") is None:
        message = "there is no systemd-analyze; `make test-deps` installs it"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, check=False
    )


def test_systemd_takes_the_unit_and_finds_it_well_fenced(tmp_path: Path) -> None:
    unit = tmp_path / "drafthouse.service"
    text = (DEPLOY / "drafthouse.service").read_text("utf-8")
    program = "/opt/drafthouse/bin/drafthouse"
    assert text.count(program) == 1
    unit.write_text(text.replace(program, "/bin/sh"), "utf-8")  # one that is here
    verified = systemd_analyze("verify", "--man=no", str(unit))
    assert (verified.returncode, verified.stderr) == (0, "")
    fenced = systemd_analyze("security", "--offline=true", "--threshold=20", str(unit))
    assert fenced.returncode == 0, fenced.stdout[-200:]
    worse = tmp_path / "open.service"
    worse.write_text(text.replace("CapabilityBoundingSet=\n", "").replace(program, "/bin/true"))
    assert systemd_analyze("security", "--offline=true", "--threshold=20", str(worse)).returncode

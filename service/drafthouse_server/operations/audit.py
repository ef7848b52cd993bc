"""The audit trail: who administered what, when, and with which outcome. One JSON object a line.

A line goes to a file, which is opened anew for each, so that it may be renamed or replaced at any
time; or, without a file, to the log. Lines are added whole, so that several processes may share a
file. No line holds a key, a secret or a client's text.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["OK", "SERVER", "AuditTrail", "local_actor", "note_renewal"]

OK = "ok"
"""Outcome of an act that was done."""

SERVER = "server"
"""Who acts where nobody asked: the server itself, such as when certificates are replaced."""

_NO_DETAIL: Mapping[str, object] = MappingProxyType({})
_MODE = 0o600

_log = logging.getLogger(__name__)
# Whatever log_level is: a trail without its lines is none.
_log.setLevel(logging.INFO)


class AuditTrail:
    """Writes the audit trail.

    Args:
        path: The file, made with mode 0600 where there is none; empty: the log.
        clock: Seconds since 1970.

    Thread:
        Any.
    """

    def __init__(self, path: str = "", clock: Callable[[], float] = time.time) -> None:
        self._path = Path(path) if path else None
        self._clock = clock
        self._is_cut = False  # whether the file ends with a part of a line

    def check(self) -> str:
        """Returns why the file cannot be written; empty where it can be, or where there is none."""
        if self._path is None:
            return ""
        try:
            self._append(b"")
        except OSError as error:
            advice = "give a file in a folder that this user may write, or change its owner"
            return f"audit_file {self._path} cannot be written: {error.strerror}; {advice}"
        return ""

    def note(
        self,
        actor: str,
        action: str,
        target: str,
        outcome: str = OK,
        detail: Mapping[str, object] = _NO_DETAIL,
    ) -> None:
        """Writes one line. One that cannot be written to the file goes to the log, as an error.

        Args:
            actor: Who: "uid:1000", the alternative name of a certificate, "signal:SIGTERM".
            action: What, such as "SetLimits" or "keys.revoke".
            target: Of what: "tenant:acme", "key:8f3a", "server".
            outcome: `OK`, or why it was not done: the reason of an error.
            detail: What else is of use, by name: values that JSON has; never a secret.
        """
        line = self._line(actor, action, target, outcome, detail)
        if self._path is None:
            _log.info("%s", line)
            return
        try:
            self._append(f"{line}\n".encode())
        except OSError as error:
            _log.error("audit_file %s cannot be written, %s: %s", self._path, error.strerror, line)

    def note_aside(
        self,
        actor: str,
        action: str,
        target: str,
        outcome: str = OK,
        detail: Mapping[str, object] = _NO_DETAIL,
    ) -> None:
        """Does the same on a thread of its own, for whoever may not wait for a disk that hangs."""
        told = (actor, action, target, outcome, detail)
        try:
            threading.Thread(target=self.note, args=told, name="audit").start()
        except RuntimeError:  # the machine has no more threads; whoever tells this goes on
            line = self._line(*told)
            _log.error("audit_file %s is not written, without a thread: %s", self._path, line)

    def _line(
        self, actor: str, action: str, target: str, outcome: str, detail: Mapping[str, object]
    ) -> str:
        at = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        return json.dumps(
            {
                "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
                "actor": actor,
                "action": action,
                "target": target,
                "outcome": outcome,
                **({"detail": dict(detail)} if detail else {}),
            }
        )

    def _append(self, line: bytes) -> None:
        """Adds a line to the file; an empty one only opens it.

        Raises:
            OSError: it could not, or not the whole line.
        """
        assert self._path is not None
        # By one call, at the end of the file whatever others have written: a line stays whole. A
        # pipe that nobody reads is refused, not waited for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._path, flags, _MODE)
        try:
            if line:
                whole = b"\n" + line if self._is_cut else line
                n_bytes = os.write(descriptor, whole)
                if n_bytes:
                    self._is_cut = n_bytes < len(whole)
                if n_bytes < len(whole):  # what a disk does that is full from here on
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(descriptor)


def local_actor() -> str:
    """Returns who runs this process, as the trail names a user of this machine."""
    return f"uid:{os.getuid()}"


def note_renewal(trail: AuditTrail, path: str, fingerprint: str) -> None:
    """Notes that certificates were read again because their files have changed.

    Args:
        trail: Is told.
        path: The file: the server's certificate, or authorities'.
        fingerprint: SHA-256 of what of it is in use, hexadecimal; empty where it is not used.
    """
    outcome = OK if fingerprint else "refused"
    detail = {"sha256": fingerprint} if fingerprint else {}
    # Who connects waits for what reads the certificates: not for the trail's disk, too.
    trail.note_aside(SERVER, "ReloadCertificates", f"certificate:{path}", outcome, detail)

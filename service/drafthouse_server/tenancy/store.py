"""The store: a database of tenants, keys, limits and usage, in SQLite or PostgreSQL.

`Store` gives transactions; what is asked and changed in them stands in `records`. A server asks it
through `StoreThread`, so that the event loop never waits for a disk or a database: one thread
reads, one writes, and what has collected while a commit was on its way shares the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import functools
import logging
import math
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import Connection, Engine, event, exc, func, select
from sqlalchemy.engine import URL

from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError, StoreError, StoreRefusal
from drafthouse_server.tenancy import migrations, records
from drafthouse_server.tenancy.keys import pepper_id, read_pepper
from drafthouse_server.usage.record import UsageQuery, UsageRecord, UsageStoreFailed
from drafthouse_server.usage.write_ahead import write_ahead

__all__ = ["Store", "StoreThread", "StoreUsage", "read_pepper_of", "store_url"]

_log = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_BUSY_S = 5.0
"""How long SQLite waits for another writer's transaction."""
_N_LOG_HEAD = 32  # bytes of the head of SQLite's write-ahead log, with its two salts
_CONNECT_S = 2
_STATEMENT_MS = 10_000
_USAGE_S = 10.0
"""Seconds that the store has to take, or to find, records of usage."""
_PAUSE_S = 1.0  # after a failure, in which the usage of the store is not asked again
_CLOSE_S = 2.0
_UPGRADE_LOCK = 0x6472_6166  # a number of ours for PostgreSQL's advisory locks
_N_GROUP_MAX = 256
_N_QUEUED_MAX = 10_000
_WRITES = "drafthouse_writes"
_FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Raised by faults of ours, such as on rows that somebody has written by hand."""
_HINT = "such as sqlite:///drafthouse.db, or postgresql://USER@HOST/DATABASE"


class Store:
    """A database, opened. May be used on any thread.

    Args:
        engine: Of SQLAlchemy; `open` makes the right one.
        path: The file of SQLite; None of a server.
        shown: Its URL without a password.
    """

    def __init__(self, engine: Engine, path: Path | None, shown: str) -> None:
        self._engine = engine
        self._path = path
        self._file: tuple[int, int] | None = None
        self._log_head = b""
        self._file_lock = threading.Lock()
        self._is_closed = False
        self._drivers: weakref.WeakSet[Any] = weakref.WeakSet()
        if path is None:
            event.listen(engine, "connect", lambda driver, _: self._drivers.add(driver))
        self.shown = shown
        """URL of the store, without a password."""

    @classmethod
    def open(cls, url: str, *, may_make: bool = True) -> Store:
        """Opens a store, and brings its schema to the newest.

        Args:
            url: As of SQLAlchemy: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE.
            may_make: Whether a file that is missing is made. While a server runs it must not be: an
                empty one in its place is a store whose tenants were all deleted.

        Raises:
            ConfigError: the URL is wrong, or its driver is not installed.
            StoreError: the store cannot be used, or a newer release has made it.
        """
        parsed = store_url(url)
        if parsed.get_backend_name() == "sqlite":
            store = cls._open_file(parsed, may_make=may_make)
        else:
            engine = _server_engine(parsed)
            # Its query may hold a password, too.
            store = cls(engine, None, parsed.set(query={}).render_as_string(hide_password=True))
        with contextlib.ExitStack() as undo:
            undo.callback(store.close)
            store._upgrade()
            undo.pop_all()
        return store

    @classmethod
    def _open_file(cls, url: URL, *, may_make: bool) -> Store:
        path = Path(url.database or "").absolute()
        try:
            _make_file(path, may_make=may_make)
        except OSError as error:
            problem = f"cannot open the store {path}: {error.strerror}; check path and permissions"
            raise StoreError(problem) from None
        return cls(_file_engine(path), path, f"sqlite:///{path}")

    @property
    def path(self) -> Path | None:
        """The file of SQLite; None of a server."""
        return self._path

    @contextlib.contextmanager
    def reading(self) -> Iterator[Connection]:
        """Gives a connection in a transaction that changes nothing.

        Raises:
            StoreError: the store cannot be used.
        """
        with self._transaction({}) as connection:
            yield connection

    @contextlib.contextmanager
    def writing(self) -> Iterator[Connection]:
        """Gives a connection in a transaction, which is committed, and durable, at the end.

        Raises:
            StoreError: the store cannot be used, and nothing has changed.
        """
        with self._transaction({_WRITES: True}) as connection:
            yield connection

    @contextlib.contextmanager
    def _transaction(self, options: dict[str, Any]) -> Iterator[Connection]:
        self._check_file()
        try:
            with self._engine.connect() as connection:
                connection.execution_options(**options)
                try:
                    with connection.begin():
                        yield connection
                finally:
                    # Of a thread that was stuck when the store was closed: nobody else closes it.
                    if self._is_closed and not connection.invalidated:
                        connection.detach()
        except exc.SQLAlchemyError as error:
            problem = f"the store {self.shown} cannot be used: {_reason(error)}"
            is_away = not isinstance(error, exc.IntegrityError | exc.DataError)
            raise StoreError(problem, is_away=is_away) from error
        except (UnicodeError, OverflowError) as error:
            # Drivers say so of texts and numbers that no database has, and SQLAlchemy does not
            # know it. Unknown, it would end the thread that works for all.
            problem = f"the store {self.shown} cannot be asked: {error}"
            raise StoreError(problem, is_away=False) from error

    def _check_file(self) -> None:
        """Sees to it that a file that was replaced, as by a backup, is opened anew."""
        if self._path is None:
            return
        try:
            found = self._path.stat()
        except OSError as error:
            self._engine.dispose()
            raise StoreError(f"the store {self.shown} cannot be used: {error.strerror}") from None
        with self._file_lock:
            file = found.st_dev, found.st_ino
            if self._file not in (None, file):
                self._engine.dispose()
                if self._log_head and self._log_head == self._read_log_head():
                    # SQLite would write what the log holds into the new file.
                    name, told = self._path.name, f"the store {self.shown} was replaced, and"
                    told += f" {name}-wal of the one before lies beside it; remove {name}-wal and"
                    raise StoreError(f"{told} {name}-shm")
                _log.warning("the store %s was replaced: opening it anew", self.shown)
            self._file, self._log_head = file, self._read_log_head()

    def _read_log_head(self) -> bytes:
        """Returns the start of the write-ahead log; its random salts tell it from any other."""
        with contextlib.suppress(OSError), Path(f"{self._path}-wal").open("rb") as log:
            return log.read(_N_LOG_HEAD)
        return b""

    def interrupt(self) -> None:
        """Breaks the connections to a database server that does not answer.

        Who waits for it gets StoreError, and the next one connects anew. SQLite, which waits for no
        more than its lock, and that not for long, is left alone.
        """
        for driver in list(self._drivers):
            with contextlib.suppress(OSError, self._engine.dialect.loaded_dbapi.Error):
                if not driver.closed:
                    with socket.socket(fileno=os.dup(driver.fileno())) as line:
                        line.shutdown(socket.SHUT_RDWR)

    def _upgrade(self) -> None:
        with self.writing() as connection:
            if self._path is None:
                connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
                connection.execute(select(func.pg_advisory_xact_lock(_UPGRADE_LOCK)))
            if problem := records.encoding_problem(connection):
                raise StoreError(f"the store {self.shown} cannot be used: {problem}")
            before = migrations.revision_of(connection)
            migrations.upgrade(connection)
        if before != migrations.NEWEST:
            _log.info("the store's schema is %s now, was %s", migrations.NEWEST, before or "empty")

    def close(self) -> None:
        """Closes its connections."""
        self._is_closed = True
        self._engine.dispose()


def read_pepper_of(config: Config, store: Store) -> bytes:
    """Returns the pepper that a store's keys are made with.

    The first one who asks makes the file, and the store remembers whose it is: a file that is
    missing later, or another one, is told, for no key would work with it.

    Raises:
        ConfigError: `key_pepper_file` is not set and has no default, or cannot be used.
        StoreError: the store cannot be used, or its keys were made with another pepper.
    """
    if config.key_pepper_file:
        path = Path(config.key_pepper_file)
    elif store.path is not None:
        path = store.path.with_name(f"{store.path.name}.pepper")
    else:
        problem = (
            "key_pepper_file is not set, and a store on a server has no default for it; give the"
            " path of a file outside the database, which is made when it is not there"
        )
        raise ConfigError("key_pepper_file", "", problem=problem)
    with store.reading() as connection:
        known = records.version(connection).pepper_id
    pepper = read_pepper(path, may_make=not known)
    if not known:
        with store.writing() as connection:
            known = records.remember_pepper(connection, pepper_id(pepper))
    if known != pepper_id(pepper):
        raise StoreError(
            f"the keys of the store {store.shown} were made with another pepper than that of"
            f" {path}; restore the file that belongs to the store, or set key_pepper_file to it"
        )
    return pepper


def store_url(url: str) -> URL:
    """Returns a checked URL. No error shows it: it may hold a password.

    Raises:
        ConfigError: it is none, or of what can be no store.
    """
    try:
        parsed = sqlalchemy.make_url(url)
        backend = parsed.get_backend_name()
    except (exc.ArgumentError, ValueError):
        raise _wrong(f"store is no URL of a database; give one, {_HINT}") from None
    if backend not in ("sqlite", "postgresql"):
        raise _wrong(f"store is a URL of {backend!r}; expected SQLite or PostgreSQL, {_HINT}")
    if backend == "sqlite" and parsed.database in (None, "", ":memory:"):
        raise _wrong(f"store needs a file that outlives the server, {_HINT}")
    # What follows the first one would count as the host, which errors show.
    if backend == "postgresql" and url.partition("?")[0].count("@") > 1:
        raise _wrong('store has an "@" in its user or password; write %40 for it, and %25 for "%"')
    return parsed.set(drivername="sqlite" if backend == "sqlite" else "postgresql+psycopg")


def _wrong(problem: str) -> ConfigError:
    return ConfigError("store", "(hidden)", problem=problem)


def _file_engine(path: Path) -> Engine:
    name = quote(os.fsencode(path))
    url = URL.create("sqlite", database=f"file:{name}", query={"mode": "rw", "uri": "true"})
    arguments = {"timeout": _BUSY_S, "check_same_thread": False}
    pool = sqlalchemy.pool.QueuePool
    engine = sqlalchemy.create_engine(url, connect_args=arguments, poolclass=pool, pool_size=2)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:  # noqa: ANN401  # of the driver
        # The driver begins no transaction by itself then: ours do, at once as writers.
        connection.isolation_level = None
        write_ahead(connection, _BUSY_S)
        connection.execute("PRAGMA foreign_keys = ON")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        is_writing = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")

    return engine


def _make_file(path: Path, *, may_make: bool) -> None:
    """Makes the file of a store, here alone: one that is missing later must not come back empty."""
    # Not opened if it is there: closing would take SQLite's locks from all of this process (POSIX),
    # and the next end of another one would delete the log under them.
    if may_make:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    if not os.access(path, os.R_OK | os.W_OK):
        code = errno.EROFS if os.statvfs(path).f_flag & os.ST_RDONLY else errno.EACCES
        raise OSError(code, os.strerror(code))


def _server_engine(url: URL) -> Engine:
    given = url.query.get("options", os.environ.get("PGOPTIONS", ""))
    given = given if isinstance(given, str) else " ".join(given)
    own = f"-c statement_timeout={_STATEMENT_MS} -c lock_timeout={_STATEMENT_MS}"
    arguments = {
        "connect_timeout": _CONNECT_S,
        "application_name": "drafthouse",
        "client_encoding": "utf8",
        "prepare_threshold": None,  # PgBouncer hands a connection on with what is prepared there
        "options": f"{given} {own}".strip(),  # the last one counts
        "keepalives_idle": 5,  # a host that has gone is noticed within a quarter of a minute
        "keepalives_interval": 3,
        "keepalives_count": 3,
    }
    try:
        return sqlalchemy.create_engine(
            url, connect_args=arguments, pool_pre_ping=True, pool_size=2, max_overflow=1
        )
    except ImportError:
        raise _wrong("store's driver is missing; install 'drafthouse-server[postgresql]'") from None


def _reason(error: exc.SQLAlchemyError) -> str:
    """Returns the first line of what a driver says, without statement and values."""
    line, *_ = str(getattr(error, "orig", None) or error).strip().splitlines() or [""]
    return line.replace("disk I/O error", "disk I/O error (it may be full)") or type(error).__name__


class _Job(Generic[_Result]):
    """Work for the store, and where its result goes."""

    def __init__(self, work: Callable[[Connection], _Result]) -> None:
        self.work = work
        self.future: Future[_Result] = Future()


class StoreThread:
    """A thread that works on a store, in groups: those that wait together share a transaction.

    A result is told when the transaction is committed. Work is a function of a connection; it may
    run twice, in a transaction that was rolled back in between, and must have no other effect.

    Args:
        store: Where it works.
        is_writing: Whether it may change something.
    """

    def __init__(self, store: Store, *, is_writing: bool) -> None:
        self._transaction = store.writing if is_writing else store.reading
        self._store = store
        self._jobs: queue.Queue[_Job[Any] | None] = queue.Queue(_N_QUEUED_MAX)
        name = f"store-{'writer' if is_writing else 'reader'}"
        # A daemon: a database that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[Connection], _Result]) -> Future[_Result]:
        """Takes work, and returns where its result will be: or StoreError, or StoreRefusal."""
        job = _Job(work)
        try:
            if not self._thread.is_alive():
                raise queue.Full
            self._jobs.put_nowait(job)
        except queue.Full:
            job.future.set_exception(StoreError("the store is behind with its work"))
        return job.future

    async def run(self, work: Callable[[Connection], _Result], timeout_s: float) -> _Result:
        """Returns the result of work.

        Args:
            work: A function of a connection.
            timeout_s: After so many seconds the connections of the store are broken.

        Raises:
            StoreError: the store cannot be used, or has not answered in time.
            StoreRefusal: as `work` raises it.

        Cancellation: the work is done or not, and its result is lost.
        """
        future = asyncio.wrap_future(self.submit(work))
        future.add_done_callback(_forget)  # whoever waits for it may have left by then
        done, _ = await asyncio.wait({future}, timeout=timeout_s)
        if not done:
            self._store.interrupt()
            raise StoreError(f"the store has not answered within {timeout_s:g} s")
        return future.result()

    def close(self, timeout_s: float) -> None:
        """Ends the thread, when it has done what it was given, after some seconds at most."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._jobs.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._store.interrupt()
            self._thread.join(_CONNECT_S)

    def _run(self) -> None:
        while True:
            jobs = self._take()
            group = [job for job in jobs if job is not None]
            live = [job for job in group if job.future.set_running_or_notify_cancel()]
            try:
                self._do(live)
            finally:
                # Only a fault of ours leaves one without an answer; nobody shall wait for it.
                for job in live:
                    if not job.future.done():
                        job.future.set_exception(StoreError("the store's thread has failed"))
            if len(group) < len(jobs):
                return

    def _take(self) -> list[_Job[Any] | None]:
        """Returns what waits, as soon as something does; None among it is the end."""
        jobs = [self._jobs.get()]
        with contextlib.suppress(queue.Empty):
            while len(jobs) < _N_GROUP_MAX and jobs[-1] is not None:
                jobs.append(self._jobs.get_nowait())
        return jobs

    def _do(self, jobs: list[_Job[Any]]) -> None:
        """Does jobs in one transaction, or, where one of them fails, each in its own."""
        if not jobs:
            return
        try:
            results = self._try(jobs)
        except (StoreError, StoreRefusal) as error:
            is_away = isinstance(error, StoreError) and error.is_away
            for job in jobs:
                if len(jobs) == 1 or is_away:
                    job.future.set_exception(error)
                else:
                    self._do([job])
            return
        for job, result in zip(jobs, results, strict=True):
            job.future.set_result(result)

    def _try(self, jobs: list[_Job[Any]]) -> list[Any]:
        try:
            with self._transaction() as connection:
                return [job.work(connection) for job in jobs]
        except _FAULTS as error:  # it must not end the thread that works for all
            if len(jobs) == 1:  # of several, each is tried alone
                _log.exception("what the store %s was asked has failed", self._store.shown)
            problem = f"the store {self._store.shown} cannot be asked: a fault, see the log"
            raise StoreError(problem, is_away=False) from error


class StoreUsage:
    """The usage records of a store, as the journal brings them there and lists read them.

    It has threads and connections of its own, so that long lists hold up no key.

    Args:
        store: Closed with it.

    Thread:
        Any that may wait, several at once.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reader = StoreThread(store, is_writing=False)
        self._writer = StoreThread(store, is_writing=True)
        self._failed_at = -math.inf
        self.answered_at = time.monotonic()
        """When it has answered last, by the clock."""
        self.is_away = False
        """Whether it has not answered when it was asked last."""
        self._sum_s = records.SUM_MS / 1000  # of the first sum, at a start: no call waits for it

    @classmethod
    def open(cls, url: str, *, may_make: bool = True) -> StoreUsage:
        """Opens the usage of a store, as `Store.open` does.

        Raises:
            ConfigError, StoreError: See `Store.open`.
        """
        return cls(Store.open(url, may_make=may_make))

    def add(self, records: Sequence[UsageRecord]) -> None:
        """Keeps records, all or none of them; those that it has already change nothing.

        Raises:
            UsageStoreFailed: It is not known to have kept them.
        """
        rows = [_row_of(record) for record in records]
        self._do(self._writer, functools.partial(_add_usage, records=rows))

    def find(self, query: UsageQuery) -> Sequence[UsageRecord]:
        """Returns records by their end, and where that is the same, by their id.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        after = query.after and (query.after.ended_at, query.after.record_id)
        asked: dict[str, Any] = {
            f.name: _as_stored(getattr(query, f.name)) for f in dataclasses.fields(query)
        }
        work = functools.partial(_find_usage, **asked | {"after": after})
        return [_record_of(row) for row in self._do(self._reader, work)]

    def sum_tokens(self, since: float) -> Mapping[str, int]:
        """Returns the tokens of streams that began since a time. See `UsageStore.sum_tokens`.

        Raises:
            UsageStoreFailed: It cannot tell.
        """
        timeout_s, self._sum_s = self._sum_s, 0.0
        return self._do(self._reader, functools.partial(_sum_usage, since=since), timeout_s)

    def close(self) -> None:
        """Ends its threads, and closes the store."""
        if self.is_away:
            self._store.interrupt()
        for thread in (self._reader, self._writer):
            thread.close(_CLOSE_S)
        self._store.close()

    def _do(
        self, thread: StoreThread, work: Callable[[Connection], _Result], timeout_s: float = 0.0
    ) -> _Result:
        if self.is_away and time.monotonic() < self._failed_at + _PAUSE_S:
            raise UsageStoreFailed(f"the store {self._store.shown} has just not answered")
        # While it is away an attempt only finds out whether it is back.
        timeout_s = _PAUSE_S if self.is_away else timeout_s or _USAGE_S
        future = thread.submit(work)
        try:
            result = future.result(timeout_s)
        except TimeoutError:
            self._note_failure()
            self._store.interrupt()
            problem = f"the store {self._store.shown} has not answered within {timeout_s:g} s"
            raise UsageStoreFailed(problem) from None
        except StoreError as error:
            if error.is_away:
                self._note_failure()
            raise UsageStoreFailed(str(error)) from error
        self.is_away = False
        self.answered_at = time.monotonic()
        return result

    def _note_failure(self) -> None:
        self.is_away = True
        self._failed_at = time.monotonic()


_add_usage, _find_usage, _sum_usage = records.add_usage, records.find_usage, records.sum_usage
_LENGTHS = {
    column.name: column.type.length
    for column in records.usage.columns
    if isinstance(column.type, sqlalchemy.String)
}


def _record_of(row: Mapping[str, Any]) -> UsageRecord:
    return UsageRecord(**row)


def _row_of(record: UsageRecord) -> dict[str, object]:
    """Returns a record as every database takes it: one that none takes would hold up all others."""
    row: dict[str, object] = {}
    for field in dataclasses.fields(record):
        # Only the end user's name is a client's; it may have any character.
        stored = _as_stored(getattr(record, field.name))
        row[field.name] = stored[: _LENGTHS[field.name]] if isinstance(stored, str) else stored
    return row


def _as_stored(value: object) -> object:
    """Returns a value as the store has it: PostgreSQL has no character 0."""
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value


def _forget(future: asyncio.Future[Any]) -> None:
    """Takes note of a failure, so that asyncio does not complain of it."""
    if not future.cancelled():
        future.exception()

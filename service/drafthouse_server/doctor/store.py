"""Whether the store can be used, asked without making or changing anything there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import sqlalchemy
from sqlalchemy import exc
from sqlalchemy.engine import URL

from drafthouse_server.config import Config
from drafthouse_server.doctor.report import Problem
from drafthouse_server.doctor.surroundings import is_there
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy import migrations, records
from drafthouse_server.tenancy.keys import pepper_id, read_pepper
from drafthouse_server.tenancy.store import store_url

__all__ = ["store_problems"]

_SERVER_ARGUMENTS = {"connect_timeout": 3, "client_encoding": "utf8"}


def store_problems(config: Config) -> Iterator[Problem]:
    """Yields what is wrong with the store. Shows no password."""
    try:
        url = store_url(config.store)
    except ConfigError as error:
        yield Problem("store", str(error))
        return
    is_file = url.get_backend_name() == "sqlite"
    found = _look_at_file(Path(url.database or "")) if is_file else _ask(url)
    revision = found.revision
    if problem := found.problem or _pepper_problem(config, url, found.pepper_id):
        yield Problem("store", problem)
    elif revision and revision < migrations.NEWEST:
        yield Problem(
            "store",
            f"the store's schema is {revision}, and the first start of this release, or command of"
            f" it, brings it to {migrations.NEWEST}, which older releases refuse; back the store up"
            " before",
            "warning",
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What a database has told."""

    problem: str = ""
    """What is wrong with it; empty where nothing is."""
    revision: str | None = None
    """Of its schema; None where it has none yet."""
    pepper_id: str = ""
    """Of the pepper that its keys were made with; empty before the first key."""


def _look_at_file(path: Path) -> _Found:
    if not is_there(path):
        folder = path.absolute().parent
        if os.access(folder, os.W_OK | os.X_OK):
            return _Found()  # it is made at the first start
        problem = f"the store {path} is not there, and {folder} cannot be written; check the path"
        return _Found(problem)
    if path.is_dir():
        return _Found(f"the store {path} is a folder; give the path of a file in it")
    if not os.access(path, os.R_OK | os.W_OK):
        is_fixed = os.statvfs(path).f_flag & os.ST_RDONLY
        advice = "its disk is mounted read-only" if is_fixed else "check its owner and mode"
        return _Found(f"the store {path} cannot be read and written; {advice}")
    name = quote(os.fsencode(path.absolute()))
    return _ask(URL.create("sqlite", database=f"file:{name}", query={"mode": "ro", "uri": "true"}))


def _ask(url: URL) -> _Found:
    """Returns what is wrong with a database, the revision of its schema and whose pepper it has."""
    is_file = url.get_backend_name() == "sqlite"
    # Its query may hold a password, too.
    shown = "the file" if is_file else url.set(query={}).render_as_string(hide_password=True)
    try:
        engine = sqlalchemy.create_engine(
            url,
            connect_args={} if is_file else _SERVER_ARGUMENTS,
            poolclass=sqlalchemy.NullPool,  # asked once: nothing is kept, also where it fails
        )
        with engine.connect() as connection:
            if problem := records.encoding_problem(connection):
                return _Found(f"the store {shown} cannot be used: {problem}")
            revision = migrations.revision_of(connection)
            is_known = revision is not None and revision <= migrations.NEWEST
            known = records.version(connection).pepper_id if is_known else ""
    except ModuleNotFoundError:
        advice = "pip install 'drafthouse-server[postgresql]'"
        return _Found(f"a store on PostgreSQL needs its driver; {advice}")
    except exc.SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        advice = (
            "check its disk, which may be full" if is_file else "check that it runs, and the URL"
        )
        return _Found(f"the store cannot be used: {shown}: {reason}; {advice}")
    if revision and revision > migrations.NEWEST:
        return _Found(
            f"the store's schema is {revision}, of a newer release than this one, which knows"
            f" {migrations.NEWEST}; upgrade drafthouse-server"
        )
    return _Found("", revision, known)


def _pepper_problem(config: Config, url: URL, known: str) -> str:
    """Returns what is wrong with the pepper, in the words of `read_pepper_of`; empty: nothing."""
    name = f"{url.database}.pepper" if url.get_backend_name() == "sqlite" else ""
    path = Path(config.key_pepper_file or name)
    if not str(path.name):
        return (
            "key_pepper_file is not set, and a store on a server has no default for it; give the"
            " path of a file outside the database"
        )
    if not (known or is_there(path)):  # it is made at the first start
        folder = path.absolute().parent
        if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
            return ""
        return f"key_pepper_file {path} cannot be made: {folder} cannot be written; check the path"
    try:
        pepper = read_pepper(path)
    except ConfigError as error:
        return str(error)
    if known and known != pepper_id(pepper):
        return (
            f"the keys of the store were made with another pepper than that of {path}; restore the"
            " file that belongs to the store, or set key_pepper_file to it"
        )
    return ""

"""Whether the store can be used, asked without making or changing anything there."""

from __future__ import annotations

import os
from pathlib import Path

import sqlalchemy
from sqlalchemy import exc
from sqlalchemy.engine import URL

from drafthouse_server.config import Config
from drafthouse_server.errors import ConfigError
from drafthouse_server.tenancy import migrations
from drafthouse_server.tenancy.keys import read_pepper

__all__ = ["store_problem"]

_CONNECT_S = 3


def store_problem(config: Config) -> str:
    """Returns what is wrong with the store; empty where nothing is. Shows no password."""
    try:
        url = sqlalchemy.make_url(config.store)
        backend = url.get_backend_name()
    except (exc.ArgumentError, ValueError):
        return (
            "store is no URL of a database; give one, such as sqlite:///drafthouse.db, or"
            " postgresql://USER@HOST/DATABASE"
        )
    if backend == "sqlite":
        return _file_problem(Path(url.database or "")) or _pepper_problem(config, url)
    return _connect_problem(url.set(drivername="postgresql+psycopg")) or _pepper_problem(
        config, url
    )


def _file_problem(path: Path) -> str:
    if not path.exists():
        folder = path.absolute().parent
        if os.access(folder, os.W_OK | os.X_OK):
            return ""  # it is made at the first start
        return f"the store {path} is not there, and {folder} cannot be written; check the path"
    if not os.access(path, os.R_OK | os.W_OK):
        return f"the store {path} cannot be read and written; check its owner and mode"
    return _connect_problem(sqlalchemy.make_url(f"sqlite:///file:{path}?mode=ro&uri=true"))


def _connect_problem(url: URL) -> str:
    is_file = url.get_backend_name() == "sqlite"
    shown = "the file" if is_file else url.render_as_string(hide_password=True)
    try:
        engine = sqlalchemy.create_engine(
            url, connect_args={} if is_file else {"connect_timeout": _CONNECT_S}
        )
        with engine.connect() as connection:
            revision = migrations.revision_of(connection)
        engine.dispose()
    except ModuleNotFoundError:
        return "a store on PostgreSQL needs its driver; pip install 'drafthouse-server[postgresql]'"
    except exc.SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        return f"the store cannot be used: {shown}: {reason}; check that it runs, and the URL"
    if revision and revision > migrations.NEWEST:
        return (
            f"the store's schema is {revision}, of a newer release than this one, which knows"
            f" {migrations.NEWEST}; upgrade drafthouse-server"
        )
    return ""


def _pepper_problem(config: Config, url: URL) -> str:
    name = f"{url.database}.pepper" if url.get_backend_name() == "sqlite" else ""
    path = Path(config.key_pepper_file or name)
    if not str(path.name):
        return (
            "key_pepper_file is not set, and a store on a server has no default for it; give the"
            " path of a file outside the database"
        )
    if path.exists():
        try:
            read_pepper(path)
        except ConfigError as error:
            return str(error)
    return ""

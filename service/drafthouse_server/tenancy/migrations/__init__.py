"""The store's schema, revision by revision, and how a store is brought to the newest one.

A revision is a file of this folder, and is never changed once it has been released: a store that
was made by it is out there. A store of a revision that is not here was written by a newer release,
and is refused.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from alembic.config import Config as AlembicConfig
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from drafthouse_server.errors import StoreError

__all__ = ["NEWEST", "revision_of", "revisions", "upgrade"]

logging.getLogger("alembic").setLevel(logging.WARNING)  # two lines, and one for each revision

_FOLDER = Path(__file__).resolve().parent
_VERSION_TABLE = "drafthouse_schema"
_scripts = ScriptDirectory(str(_FOLDER), version_locations=[str(_FOLDER)])

NEWEST = "0003"
"""The revision that this release works with."""


def revisions() -> list[str]:
    """Returns all revisions, the oldest first."""
    return [script.revision for script in _scripts.walk_revisions()][::-1]


def revision_of(connection: Connection) -> str | None:
    """Returns the revision of a store, None of an empty one."""
    options = {"version_table": _VERSION_TABLE}
    return MigrationContext.configure(connection, opts=options).get_current_revision()


def upgrade(connection: Connection, target: str = NEWEST) -> None:
    """Brings a store to a revision, inside the transaction of its caller.

    Args:
        connection: In a transaction that nobody else's upgrade can enter.
        target: The revision.

    Raises:
        StoreError: the store's revision is none of this release's.
    """
    current = revision_of(connection)
    if current is not None and current not in revisions():
        raise StoreError(
            f"the store has schema {current}, which a newer release of drafthouse has made; this"
            f" one knows {target} at most: install that release again, or restore the backup of"
            " the store that was made before its upgrade"
        )
    if current == target:
        return

    def steps(revision: Any, _: MigrationContext) -> Any:  # noqa: ANN401  # alembic's own types
        return _scripts._upgrade_revs(target, revision)

    environment = EnvironmentContext(AlembicConfig(), _scripts, fn=steps)
    with environment:
        environment.configure(connection=connection, version_table=_VERSION_TABLE)
        environment.run_migrations()

"""What our own code has logged."""

from __future__ import annotations

import pytest

__all__ = ["logged"]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines of our loggers, in order.

    Others log, too: in its debug mode asyncio tells of all that takes it a tenth of a second, which
    on a machine with others to serve may be anything.
    """
    ours = (record for record in caplog.records if record.name.startswith("drafthouse"))
    return [record.getMessage() for record in ours]

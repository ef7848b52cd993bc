"""What was logged, but for what asyncio says of a slow machine."""

from __future__ import annotations

import pytest

__all__ = ["logged"]


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Returns the lines that were logged, in order.

    In its debug mode asyncio tells of all that takes it a tenth of a second, which on a machine
    with others to serve may be anything: that is left out. What else it and others log is told.
    """
    lines = ((record.name, record.getMessage()) for record in caplog.records)
    return [line for name, line in lines if name != "asyncio" or " took " not in line]

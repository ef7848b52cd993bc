"""What a test before has left to gRPC: no error of the one that runs."""

import logging


def is_of_open_loop(record: logging.LogRecord) -> bool:
    """Filters a log: False for an event that comes when its loop is closed.

    A call that a test does not wait for ends after its loop. gRPC tells whichever loop runs then,
    which logs "Event loop is closed" as an error, once in some ten thousand tests. A process with
    one loop, as a server is, cannot log that.
    """
    error = record.exc_info[1] if record.exc_info else None
    is_closed = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
    return not (is_closed and "PollerCompletionQueue._handle_events" in record.getMessage())

"""Types of the module that knows the CPU."""

__all__ = ["level"]

def level() -> int: ...

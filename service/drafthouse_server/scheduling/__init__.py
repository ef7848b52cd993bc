"""Which sequence gets which part of the next step. Every file here is pure."""

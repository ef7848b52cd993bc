"""The engine behind one protocol. Alone imports `drafthouse_engine`."""

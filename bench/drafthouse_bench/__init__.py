"""Every benchmark of Drafthouse; a development tool, never installed on a server."""

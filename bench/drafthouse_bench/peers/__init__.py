"""Drafthouse beside llama-server of the same source, in turns."""

"""The step loop beside the event loop: submit, fan-out, text, counts."""

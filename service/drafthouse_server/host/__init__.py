"""The machine below: its memory and its processor, and what fits there."""

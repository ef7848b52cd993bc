"""How much is drafted, by whom, and what steps cost. Every file here is pure."""

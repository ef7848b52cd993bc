"""The command line."""

from pathlib import Path

__all__ = ["CHECKOUT"]

CHECKOUT = Path(__file__).resolve().parents[3]
"""Root of the repository; of an installed package, a folder without models."""

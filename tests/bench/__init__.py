"""Long runs that prove losslessness; not part of the daily tests."""

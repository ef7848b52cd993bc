"""How many bytes of requests are read of a tenant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthouse_server.errors import QuotaExceeded
from drafthouse_server.operations import intake
from drafthouse_server.operations.intake import Intake


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 500)), max_size=60))
def test_never_more_than_the_rate_and_a_burst_and_one_message(
    asked: list[tuple[float, int]],
) -> None:
    found, now, n_read, n_last = Intake(100.0), 0.0, 0, 0
    for pause_s, n_bytes in asked:
        now += pause_s
        try:
            found.check("a", now)
        except QuotaExceeded as error:
            found.check("a", now + (error.retry_after_s or 0.0) + 1e-6)
            continue
        found.add("a", n_bytes, now)
        n_read, n_last = n_read + n_bytes, max(n_last, n_bytes)
        assert n_read <= 100 * now + 100 + n_last + 1e-6


def test_tenants_that_have_sent_nothing_of_late_are_forgotten() -> None:
    found = Intake(100.0)
    for i in range(intake._N_TENANTS_MAX + 1):
        found.add(f"t{i}", 100, 0.0)
    found.add("late", 1000, 5.0)
    assert list(found._paid_at) == ["late"]
    with pytest.raises(QuotaExceeded, match="'late' has reached its limit of 100 bytes"):
        found.check("late", 5.0)

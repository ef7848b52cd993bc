"""Products of rows with weights as our patches compute them: 0014, 0016 to 0018, 0023, 0024."""

from __future__ import annotations

import subprocess

from tests.support.built import built


def test_any_number_of_rows_gives_the_bits_of_a_plain_sum() -> None:
    """Tiles, fours and what is left over, columns in sixteens and eights: one sum, to the last bit.

    So a row is the same alone and in any company. No demo model has such weights.
    """
    done = subprocess.run(
        [str(built("rows_test"))], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("ok: ")

"""Reports as people and programs read them."""

from __future__ import annotations

from drafthouse_server.doctor.report import Problem, Report, Section


def report(*problems: Problem) -> Report:
    section = Section("memory")
    section.add("free_bytes", 2048, "2.05 kB")
    section.add("names", ["a", "b"])
    return Report([section], list(problems), ["tls"], ["store"])


def test_people_read_a_table_and_programs_read_numbers() -> None:
    bad, odd = Problem("tls", "broken; mend it"), Problem("cpu", "slow; buy one", "warning")
    assert list(report(bad, odd).lines()) == [
        "memory",
        "  free   2.05 kB",
        "  names  a, b",
        "",
        "checked  tls: nothing wrong",
        "not set up  store: not checked",
        "error  tls: broken; mend it",
        "warning  cpu: slow; buy one",
        "1 error, 1 warning",
    ]
    assert report(bad).as_json() == {
        "memory": {"free_bytes": 2048, "names": ["a", "b"]},
        "problems": [{"check": "tls", "severity": "error", "problem": "broken; mend it"}],
        "passed": ["tls"],
        "left_out": ["store"],
        "ok": False,
    }


def test_warnings_stand_in_no_server_s_way() -> None:
    assert report(Problem("cpu", "slow; buy one", "warning")).is_well
    assert not report(Problem("cpu", "slow; buy one")).is_well

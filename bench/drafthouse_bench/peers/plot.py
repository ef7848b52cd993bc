"""The plots of `drafthouse-bench peers`: throughput against streams, and against the p99 gap."""

from __future__ import annotations

import importlib.util
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from drafthouse_bench.peers.versus import PeerRow
from drafthouse_bench.process import BenchError
from drafthouse_bench.trace import Figures

__all__ = ["curves", "draw", "require_matplotlib"]

Points = list[tuple[int, float, float]]
"""Streams, tokens per second, p99 gap in ms."""


def require_matplotlib() -> None:
    """Sees that plots can be drawn.

    Raises:
        BenchError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError(
            "--plot needs matplotlib: pip install matplotlib, or leave --plot out"
            " (the JSON holds all figures)"
        )


def curves(rows: Sequence[PeerRow]) -> dict[str, dict[tuple[str, str], Points]]:
    """Returns the points of each model's curves, by draft type and contender, streams ascending."""
    found: dict[str, dict[tuple[str, str], Points]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.case.scenario != "closed":
            continue
        rate = "" if row.case.acceptance is None else f" {row.case.acceptance:g}"
        for name, turns in (("drafthouse", row.ours), ("llama-server", row.theirs)):
            found[row.case.model][f"{row.case.draft}{rate}", name].append(
                _point(row.case.streams, turns)
            )
    for model in found.values():
        for points in model.values():
            points.sort()
    return found


def _point(n_streams: int, turns: Sequence[Figures]) -> tuple[int, float, float]:
    return (
        n_streams,
        statistics.median(turn.tokens_per_s for turn in turns),
        statistics.median(turn.gap_p99_s for turn in turns) * 1000,
    )


def draw(path: Path, rows: Sequence[PeerRow]) -> bool:
    """Draws two plots per model into one file, of the kind that its suffix says (SVG, PNG).

    Returns:
        False when no case can be drawn.

    Raises:
        BenchError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    import matplotlib as mpl  # noqa: PLC0415  optional, and slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415  after the choice of its backend

    models = curves(rows)
    if not models:
        return False
    figure, axes = plt.subplots(
        len(models), 2, figsize=(12, 4.5 * len(models)), squeeze=False, layout="constrained"
    )
    for (model, lines), (by_streams, by_gap) in zip(models.items(), axes, strict=True):
        colours: dict[str, str] = {}
        for (draft, name), points in lines.items():
            colour = colours.setdefault(draft, f"C{len(colours)}")
            is_ours = name == "drafthouse"
            style = {"color": colour, "linestyle": "-" if is_ours else "--", "marker": "o"}
            style |= {"label": f"{draft}, {name}", "markerfacecolor": colour if is_ours else "none"}
            streams, speeds, gaps = zip(*points, strict=True)
            by_streams.plot(streams, speeds, **style)
            by_gap.plot(gaps, speeds, **style)
        by_streams.set(title=model, xlabel="streams", ylabel="tokens/s", xscale="log")
        by_streams.set_xticks(sorted({p[0] for points in lines.values() for p in points}))
        by_streams.xaxis.set_major_formatter("{x:g}")
        by_streams.xaxis.set_minor_formatter("")
        by_gap.set(title=model, xlabel="gap between tokens, p99, ms", ylabel="tokens/s")
        by_streams.set_ylim(bottom=0)
        by_gap.set_ylim(bottom=0)
        by_streams.legend(fontsize="x-small")
    figure.savefig(path)
    plt.close(figure)
    return True

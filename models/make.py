"""Makes the demo models from nothing: `python -m models.make --family dense`.

Corpus → tokenizer → target → MTP head → EAGLE-3 draft → ordinary draft → GGUF files → structure
check. A stage whose checkpoint exists is not repeated, so an interrupted run goes on where it was.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

from models.architecture import DRAFT, FAMILIES
from models.export import export_eagle3, export_trunk
from models.structure import structure_differences
from models.training import Schedule
from models.workshop import Workshop

__all__ = ["main"]

ALLOCATOR = {
    "OMP_PROC_BIND": "true",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "MALLOC_TRIM_THRESHOLD_": "20000000000",
}
"""Environment that spares page faults: +60 % training speed on two cores."""

SHIPPED = Path(__file__).parent


def main() -> int:
    """Makes a family, or both, and compares their structure with the shipped files.

    Returns:
        Exit status: 0 if every file has the structure of its shipped twin.
    """
    options = _parser().parse_args()
    if not ALLOCATOR.keys() <= os.environ.keys():
        # The C library and OpenMP read them at process start only.
        os.execve(sys.executable, sys.orig_argv, {**ALLOCATOR, **os.environ})  # noqa: S606 - our own command line
    torch.set_num_threads(options.threads)
    workshop = Workshop.open(options.out, _say)
    families = FAMILIES if options.family == "all" else [options.family]
    files = [path for family in families for path in _make_family(workshop, family, options)]
    files.append(_make_draft(workshop, options.draft_seconds))
    return _compare(files)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.make", description=__doc__)
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="all", help="which target")
    parser.add_argument(
        "--out", type=Path, default=Path("build/models"), help="folder for all results"
    )
    parser.add_argument("--seconds", type=float, default=1500, help="training time of a target")
    parser.add_argument("--head-seconds", type=float, default=270, help="of each draft head")
    parser.add_argument("--draft-seconds", type=float, default=120, help="of the ordinary draft")
    n_cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=n_cores, help="cores to train on")
    return parser


def _make_family(workshop: Workshop, family: str, options: argparse.Namespace) -> list[Path]:
    arch, seconds = FAMILIES[family], options.head_seconds
    late = Schedule(options.seconds, 2.5e-3, n_batch=16, n_tokens_late=arch.n_ctx)
    trunk = workshop.trunk(f"{family}-target", arch, late)
    # High rates: the heads start from the target's last layer and have little time.
    mtp = workshop.mtp(f"{family}-mtp", trunk, Schedule(seconds, 8e-3, n_batch=8, n_warmup=30))
    eagle3 = workshop.eagle3(
        f"{family}-eagle3", trunk, Schedule(seconds, 3e-3, n_batch=8, n_warmup=30)
    )
    target_path = workshop.folder / f"tiny-{arch.name}-f16.gguf"
    eagle3_path = workshop.folder / f"tiny-{arch.name}-eagle3-f16.gguf"
    export_trunk(target_path, trunk, mtp, workshop.tokenizer)
    export_eagle3(eagle3_path, eagle3, workshop.tokenizer)
    return [target_path, eagle3_path]


def _make_draft(workshop: Workshop, seconds: float) -> Path:
    schedule = Schedule(seconds, 4e-3, n_batch=16, n_tokens_late=512)
    path = workshop.folder / "tiny-draft-f16.gguf"
    export_trunk(path, workshop.trunk("draft", DRAFT, schedule), None, workshop.tokenizer)
    return path


def _compare(files: list[Path]) -> int:
    n_wrong = 0
    for file in files:
        differences = structure_differences(file, SHIPPED / file.name)
        n_wrong += bool(differences)
        _say(f"{file}: structure " + ("as shipped" if not differences else "; ".join(differences)))
    return min(n_wrong, 1)


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

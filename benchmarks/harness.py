"""What the benchmarks share: times that can be compared, and Markdown tables.

``benchmarks/record.py`` has the third part, the records.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

Work = Callable[[], object]


def nothing() -> None:
    """The ``synchronize`` of a CPU."""


def seconds_in_turns(
    works: Mapping[str, Work],
    repeats: int,
    *,
    warm_up: int = 0,
    calls: int = 1,
    synchronize: Callable[[], None] = nothing,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of one call of each work, for every repeat.

    The works take turns, so that a change of clock or load hits all of them, and times of one
    repeat can be compared.

    Args:
        works: by name.
        repeats: how many times each work is timed.
        warm_up: turns before the first that counts.
        calls: calls in a row that one time covers.
        synchronize: waits for what the device was given.
        clock: in seconds.
    """
    for _ in range(warm_up):
        for work in works.values():
            work()
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats):
        for name, work in works.items():
            synchronize()
            started = clock()
            for _ in range(calls):
                work()
            synchronize()
            seconds[name].append((clock() - started) / calls)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, and largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """What a record keeps of the times of one function."""
    deviation = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
    return {
        **spread(seconds),
        "mean": statistics.mean(seconds),
        "std": deviation,
        "repeats": len(seconds),
    }


def paired_ratio(own: Sequence[float], *others: Sequence[float]) -> dict[str, float]:
    """A function's time over that of others together, repeat by repeat."""
    pairs = zip(own, *others, strict=True)
    return spread([mine / sum(theirs) for mine, *theirs in pairs])


def status_bytes(key: str) -> int:
    """A size from /proc/self/status: VmRSS, or VmHWM (the largest VmRSS since the last reset)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def peak_extra_bytes(work: Work) -> int | None:
    """Growth of the resident peak during one run; None if the kernel cannot reset its peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    before = status_bytes("VmRSS")
    result = work()
    peak = status_bytes("VmHWM")
    del result
    return max(0, peak - before)


def markdown_table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table with one line for each row; a ``|`` in a cell is escaped."""
    lines = []
    for row in [header, ["---"] * len(header), *rows]:
        cells = (str(cell).replace("|", "\\|") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)

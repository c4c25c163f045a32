"""Clocks, power and temperature of the GPU while a check runs, from ``nvidia-smi``; nothing where
there is none."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_EVERY_MS = 250
_BUSY = 50.0
"""Percent of an interval with a kernel on the device: below, the process imports, builds or
waits."""
_NAMES = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "temperature.gpu": "celsius",
    "utilization.gpu": "busy_percent",
}


@contextmanager
def watched() -> Iterator[dict[str, Any]]:
    """Yields a dict that has, after the body, ``samples``, how many of them were busy, and of those
    (of all, if none was) the least, the median and the largest of every value; it stays empty
    without ``nvidia-smi``."""
    found: dict[str, Any] = {}
    if shutil.which("nvidia-smi") is None:
        yield found
        return
    # the first that this process may use: what the checks run on
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = [
        "nvidia-smi",
        f"--id={which}",
        f"--query-gpu={','.join(_NAMES)}",
        "--format=csv,noheader,nounits",
    ]
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            [*command, f"--loop-ms={_EVERY_MS}"], stdout=file, stderr=subprocess.STDOUT
        )
        try:
            yield found
        finally:
            process.kill()
            process.wait()
            file.seek(0)
            found |= summary(file.read())


def summary(text: str) -> dict[str, Any]:
    """Of lines of numbers in the order of what was asked for; the last line may be cut, others may
    be words."""
    samples = [row for line in text.splitlines()[:-1] if (row := _numbers(line)) is not None]
    if not samples:
        return {"samples": 0, "said": text.strip()[-300:]}
    busy = [row for row in samples if row[-1] >= _BUSY]
    values = zip(_NAMES.values(), zip(*(busy or samples), strict=True), strict=True)
    spans = {
        name: {"min": min(of), "median": statistics.median(of), "max": max(of)}
        for name, of in values
    }
    return {"samples": len(samples), "busy_samples": len(busy), **spans}


def _numbers(line: str) -> list[float] | None:
    try:
        row = [float(part) for part in line.split(",")]
    except ValueError:
        return None
    return row if len(row) == len(_NAMES) else None

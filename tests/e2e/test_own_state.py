"""A method of the user's that keeps a running mean: stopped and resumed, the run ends in the same
bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from openrlhf_ext.cli import train_ppo_ray
from tests.e2e.jobs import JOB_S, ONE_RANK, Job, Task

METHOD = Path(__file__).parents[2] / "docs/algorithms.md"


def method() -> str:
    """The worked example of the documentation."""
    return (
        METHOD.read_text().split("### State of your own")[1].split("```python\n")[1].split("```")[0]
    )


def test_a_running_mean_is_resumed_to_the_bit(tmp_path, capsys):
    task = Task.make(tmp_path)
    (tmp_path / "own.py").write_text(method())
    own = {
        "algo__advantage__estimator": "custom",
        "algo__module_path": tmp_path / "own.py",
        **ONE_RANK,
    }
    own |= {"train__full_determinism_enable": True}
    whole = Job(task.options("whole", ckpt__save_steps=1, ckpt__max_num=9, **own), tmp_path / "log")
    assert whole.finish(JOB_S) == 0, whole.text
    shutil.copytree(
        tmp_path / "checkpoints/whole/global_step1", tmp_path / "checkpoints/again/global_step1"
    )
    words = [*task.options("again", **own), "--ckpt.load_enable"]
    assert train_ppo_ray.main([*words, "--dry_run"]) == 0
    assert (
        "reinforce_mean, 3 made groups of 4" in (said := capsys.readouterr().out)
        and "goes on from" in said
    )
    again = Job(words, tmp_path / "log2")
    assert again.finish(JOB_S) == 0, again.text
    assert "resumed from" in again.text and "has no" not in again.text
    baselines = [
        [record["algorithm/baseline"] for record in task.metrics(name)]
        for name in ("whole", "again")
    ]
    assert baselines[0][1:] == baselines[1] and len(set(baselines[0])) == 3, baselines
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "again"))
    assert one.read_bytes() == other.read_bytes()
    assert (
        "mean"
        in json.loads((tmp_path / "checkpoints/whole/global_step1/controller.json").read_text())[
            "experience"
        ]["algorithm"]
    )

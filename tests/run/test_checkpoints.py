"""When a checkpoint is written, in which forms, and what a failure costs; the ranks are stand-ins
that write files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    check_files,
    read_manifest,
    write_file,
)
from openrlhf_ext.checkpoints.files import read_plain
from openrlhf_ext.checkpoints.store import write_receipt
from openrlhf_ext.driver.job import build_checkpointer
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.run import checkpoints
from openrlhf_ext.run.checkpoints import Checkpointer
from tests.driver.simulated import run_config


class Ranks:
    """Two ranks that answer like ``TrainedActor``."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.full_disk = False
        self.done = True
        self.elsewhere = False  # rank 0's node has a disk of its own
        self.written: list[list] = []

    def answer(self, method: str, timeout_s: float, **arguments) -> list:
        self.calls.append(method)
        return getattr(self, method)(**arguments)

    def save_state(self, folder: str, name: str, background: bool) -> list:
        if self.full_disk:
            raise CheckpointError("cannot write: No space left on device")
        self.folder = Path(folder)
        self.written = [
            [write_file(self.folder, f"{name}/rank{rank}", [b"state"])] for rank in range(2)
        ]
        if not background:
            return self.written
        self.finish_writing(*range(1 + self.done))
        return [None, None]

    def finish_writing(self, *ranks: int) -> None:
        """What ranks do when their files are on disk, whether the driver asks or not."""
        for rank in ranks:
            write_receipt(self.folder, f"policy-{rank}", self.written[rank])

    def has_saved(self, wait: bool) -> list:
        if wait:
            self.finish_writing(0, 1)
        return [True, wait or self.done]

    def save_model(self, path: str) -> list:
        if not self.elsewhere:
            write_file(Path(path), "model.safetensors", [b"weights"])
        return [{"model.safetensors": 7}, {}]


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def make(folder: Path, ranks: Ranks, fp8: dict | None = None, **ckpt: Any) -> Checkpointer:
    given = {"path": str(folder), "save_steps": 2, "max_num": 2, **ckpt}
    return build_checkpointer(
        run_config(ckpt=given, fp8=fp8 or {}), {"policy": ranks.answer}, "p", EventLog()
    )


def steps(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def run(checkpointer: Checkpointer, evaluations: dict[int, float], last: int) -> None:
    for step in range(1, last + 1):
        evaluation = {"eval/accuracy": evaluations[step]} if step in evaluations else None
        checkpointer.after_step(
            step, evaluation, lambda step=step: ({"at": step}, {"tokens": np.arange(step)})
        )


def test_every_second_step_and_the_newest_two(tmp_path, ranks):
    run(make(tmp_path, ranks), {}, last=7)
    assert steps(tmp_path) == ["global_step4", "global_step6"]
    manifest = read_manifest(tmp_path / "global_step6")
    assert {f.path for f in manifest.files} == {
        "controller.json",
        "groups.safetensors",
        "config.yaml",
        "policy/rank0",
        "policy/rank1",
    }
    assert load_file(tmp_path / "global_step6/groups.safetensors")["tokens"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
    ]
    state = read_plain(tmp_path / "global_step6/controller.json")
    assert (state["at"], state["prompts"], state["options"]["ckpt.save_steps"]) == (6, "p", "2")


def test_going_on_with_other_code_is_said_and_not_refused(tmp_path, ranks, monkeypatch, caplog):
    monkeypatch.setattr(checkpoints, "code_version", lambda: "0.9, commit aaaaaaaaaaaa")
    run(make(tmp_path, ranks), {}, last=2)
    before = read_manifest(tmp_path / "global_step2").about["versions"]
    assert (
        before["openrlhf_ext"] == "0.9, commit aaaaaaaaaaaa"
        and {"torch", "megatron-core"} < before.keys()
    )
    checkpoints.report_other_code(before)
    checkpoints.report_other_code({})  # of an earlier release
    assert "other code" not in caplog.text
    monkeypatch.setattr(checkpoints, "code_version", lambda: "0.9, commit bbbbbbbbbbbb")
    checkpoints.report_other_code({**before, "torch": "1.0"})
    said = (
        "resuming with other code: openrlhf_ext 0.9, commit bbbbbbbbbbbb, it was 0.9, commit "
        "aaaaaaaaaaaa"
    )
    assert (
        said in caplog.text
        and "torch" in caplog.text
        and caplog.text.count("resuming with other code") == 2
    )


def test_a_checkpoint_says_how_fp8_was_used(tmp_path, ranks):
    fp8 = {"enable": True, "emulate": True, "recipe": "delayed"}
    make(tmp_path, ranks, fp8, save_steps=1).after_step(1, None, lambda: ({}, {}))
    assert (
        read_plain(tmp_path / "global_step1/controller.json")["label"]
        == "FP8 delayed hybrid fp32, EMULATED"
    )
    run(make(tmp_path, ranks), {}, last=2)
    assert "label" not in read_plain(tmp_path / "global_step2/controller.json")


def test_the_best_is_saved_when_it_is_found_and_kept(tmp_path, ranks):
    checkpointer = make(
        tmp_path, ranks, save_steps=5, max_num=1, best_metric_key="eval/accuracy", save_hf=True
    )
    run(checkpointer, {1: 0.1, 3: 0.5, 7: 0.5, 9: 0.4}, last=11)
    assert steps(tmp_path) == [
        "best.json",
        "global_step10",
        "global_step10_hf",
        "global_step3",
        "global_step3_hf",
    ]
    assert checkpointer.store.best() == {"step": 3, "metric": "eval/accuracy", "value": 0.5}


def test_a_kill_before_the_best_is_noted_does_not_cost_it(tmp_path, ranks, monkeypatch):
    checkpointer = make(tmp_path, ranks, save_steps=1, max_num=1, best_metric_key="eval/accuracy")
    run(checkpointer, {1: 0.1}, last=1)

    def killed(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(checkpointer.store, "mark_best", killed)
        checkpointer.after_step(2, {"eval/accuracy": 0.5}, lambda: ({}, {}))
    assert checkpointer.store.best()["step"] == 1
    resumed = make(tmp_path, ranks, save_steps=1, max_num=1, best_metric_key="eval/accuracy")
    resumed.store.recover_best(tmp_path / "global_step2")
    for step in (3, 4):
        resumed.after_step(step, None, lambda: ({}, {}))
    assert resumed.store.best() == {"step": 2, "metric": "eval/accuracy", "value": 0.5}
    assert steps(tmp_path) == ["best.json", "global_step2", "global_step4"]


def test_going_back_before_the_best_keeps_the_one_before_it(tmp_path, ranks):
    checkpointer = make(tmp_path, ranks, save_steps=1, max_num=9, best_metric_key="eval/accuracy")
    run(checkpointer, {1: 0.1, 3: 0.5}, last=3)
    # global_step3 turned out to be damaged
    checkpointer.store.recover_best(tmp_path / "global_step2")
    assert checkpointer.store.best() == {"step": 1, "metric": "eval/accuracy", "value": 0.1}


def test_hf_only(tmp_path, ranks):
    run(make(tmp_path, ranks, disable_ds=True, save_hf=True), {}, last=4)
    assert (
        steps(tmp_path) == ["global_step2_hf", "global_step4_hf"]
        and "save_state" not in ranks.calls
    )


def test_weights_that_the_driver_does_not_see_are_an_error_with_the_remedy(
    tmp_path, ranks, monkeypatch
):
    monkeypatch.setattr(checkpoints, "VISIBLE_S", 0.1)
    checkpoints.write_hf(ranks.answer, "policy", str(tmp_path / "out"), "ckpt.output_dir", 1.0)
    ranks.elsewhere = True
    message = (
        r"rank 0 of the policy .*/far, .* model.safetensors .* ckpt.output_dir must be on "
        r"storage that all nodes"
    )
    with pytest.raises(CheckpointError, match=message):
        checkpoints.write_hf(ranks.answer, "policy", str(tmp_path / "far"), "ckpt.output_dir", 1.0)


def test_nothing_is_saved_unasked(tmp_path, ranks):
    run(make(tmp_path, ranks, save_steps=-1), {2: 1.0}, last=4)
    assert steps(tmp_path) == [] and ranks.calls == []


def test_a_full_disk_costs_the_new_checkpoint_only(tmp_path, ranks):
    checkpointer = make(tmp_path, ranks)
    run(checkpointer, {}, last=2)
    ranks.full_disk = True
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.after_step(4, None, lambda: ({"at": 4}, {}))
    assert steps(tmp_path) == ["global_step2"]


def test_a_background_save_is_completed_when_all_ranks_are_done(tmp_path, ranks):
    checkpointer = make(tmp_path, ranks, async_enable=True)
    ranks.done = False
    run(checkpointer, {}, last=3)
    assert steps(tmp_path) == ["global_step2.incomplete"], "one rank is still writing"
    asked = len(ranks.calls)
    ranks.finish_writing(1)
    checkpointer.poll()
    assert steps(tmp_path) == ["global_step2"] and len(ranks.calls) == asked, (
        "completed without asking busy ranks"
    )
    manifest = read_manifest(tmp_path / "global_step2")
    assert manifest.step == 2 and check_files(tmp_path / "global_step2", manifest.files) == []
    here = {
        str(path.relative_to(tmp_path / "global_step2"))
        for path in (tmp_path / "global_step2").rglob("*.*")
    }
    assert here == {"manifest.json", "controller.json", "groups.safetensors", "config.yaml"}, (
        "and the ranks' files"
    )


def test_a_background_save_that_was_written_outlives_a_failure_before_the_driver_looks(
    tmp_path, ranks
):
    ranks.done = False
    run(make(tmp_path, ranks, async_enable=True), {}, last=2)
    store = CheckpointStore(tmp_path, keep=9)
    ranks.finish_writing(1)
    store.clean()  # when the processes of the failed run have ended
    assert steps(tmp_path) == ["global_step2"]
    assert {file.path for file in read_manifest(tmp_path / "global_step2").files} >= {
        "policy/rank0",
        "policy/rank1",
    }


def test_a_background_save_that_was_not_written_does_not(tmp_path, ranks):
    ranks.done = False
    run(make(tmp_path, ranks, async_enable=True), {}, last=2)
    CheckpointStore(tmp_path, keep=9).clean()
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    "ckpt", [{}, {"async_enable": True}, {"save_steps": -1}, {"save_steps": 1}]
)
def test_what_is_saved_before_the_end_is_the_last_step_once(tmp_path, ranks, ckpt):
    checkpointer = make(tmp_path, ranks, **ckpt)
    run(checkpointer, {}, last=3)
    checkpointer.save_before_the_end(
        ({"step": 3, "at": 3}, {"tokens": np.arange(3)}), timeout_s=5.0
    )
    assert steps(tmp_path)[-1] == "global_step3" and not list(tmp_path.glob("*.incomplete"))
    assert read_plain(tmp_path / "global_step3/controller.json")["at"] == 3
    assert checkpointer.timeout_s == 5.0 and not list(tmp_path.glob("*superseded*"))


def test_who_wants_no_resumable_checkpoints_gets_none_before_the_end(tmp_path, ranks, caplog):
    make(tmp_path, ranks, disable_ds=True, save_hf=True).save_before_the_end(
        ({"step": 3}, {}), timeout_s=5.0
    )
    assert steps(tmp_path) == [] and "ckpt.disable_ds" in caplog.text


def test_the_next_save_and_the_end_wait_for_a_background_save(tmp_path, ranks):
    checkpointer = make(tmp_path, ranks, async_enable=True)
    ranks.done = False
    run(checkpointer, {}, last=4)
    assert steps(tmp_path) == ["global_step2", "global_step4.incomplete"]
    checkpointer.finish()
    assert steps(tmp_path) == ["global_step2", "global_step4"]


def test_a_failed_background_save_surfaces_and_leaves_nothing(tmp_path, ranks):
    checkpointer = make(tmp_path, ranks, async_enable=True)
    ranks.done = False
    run(checkpointer, {}, last=2)

    def fail(wait: bool) -> list:
        raise CheckpointError("cannot write: No space left on device")

    ranks.has_saved = fail
    with pytest.raises(CheckpointError, match="No space left"):
        checkpointer.after_step(3, None, lambda: ({}, {}))
    assert steps(tmp_path) == []


def test_the_best_of_training_are_chosen_among_the_saved_steps_and_a_resumed_run_keeps_them(
    tmp_path, ranks
):
    given = {"save_steps": 2, "max_num": 1, "best_metric_key": "accuracy/mean", "keep_best": 2}
    accuracies = {2: 0.2, 3: 0.9, 4: 0.6, 6: 0.4, 8: 0.1, 10: 0.1}

    def go_on(checkpointer: Checkpointer, *steps: int) -> None:
        for step in steps:
            checkpointer.after_step(
                step, None, lambda: ({}, {}), {"accuracy/mean": accuracies[step]}
            )

    go_on(make(tmp_path, ranks, **given), 2, 3, 4, 6)
    names = ["best.json", "global_step2", "global_step4", "global_step6"]
    assert steps(tmp_path) == names, "step 3 is not saved; 2 is the newest besides the best"
    resumed = make(tmp_path, ranks, **given)
    resumed.store.recover_best(tmp_path / "global_step6")
    go_on(resumed, 8, 10)
    assert steps(tmp_path) == ["best.json", "global_step10", "global_step4", "global_step6"]
    best = {"step": 4, "metric": "accuracy/mean", "value": 0.6, "next": [{"step": 6, "value": 0.4}]}
    assert (
        resumed.store.best() == best
        and read_manifest(tmp_path / "global_step10").about["best"] == best
    )


def test_the_best_by_another_metric_do_not_count(tmp_path, ranks):
    run(make(tmp_path, ranks, best_metric_key="eval/accuracy"), {1: 0.9}, last=1)
    other = make(tmp_path, ranks, best_metric_key="accuracy/mean", save_steps=1)
    other.after_step(2, None, lambda: ({}, {}), {"accuracy/mean": 0.1})
    assert other.store.best() == {"step": 2, "metric": "accuracy/mean", "value": 0.1}

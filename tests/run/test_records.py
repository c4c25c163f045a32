"""How a step is written down."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

from openrlhf_ext.config import RunConfig
from openrlhf_ext.reporting import EventLog, read_metrics
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.run import records
from openrlhf_ext.run.records import StepRecorder


def config(folder: Path, **sections: dict) -> RunConfig:
    paths = {
        "metrics_path": str(folder / "metrics.jsonl"),
        "figure_path": str(folder / "figure.png"),
    }
    return RunConfig(logger=paths, **sections)


def recorder_of(
    config: RunConfig,
    steps: int,
    resume_step: int = 0,
    events: EventLog | None = None,
    title: str = "",
) -> StepRecorder:
    """One that keeps no completions."""
    none = SimpleNamespace(close=lambda: None)
    return StepRecorder(config, steps, resume_step, events or EventLog(), title, 0, none, none)


def test_emulated_fp8_stands_in_every_line_and_record(tmp_path, capsys, caplog):
    label = "FP8 blockwise e4m3 fp32, EMULATED"
    fp8 = {"enable": True, "emulate": True, "format": "e4m3"}
    recorder = recorder_of(config(tmp_path, fp8=fp8), 2, title="grpo, toy")
    engines = [{"generation_s": 1.0, "exposed_grading_s": 0.0, "drafts": 0, "accepted": 0}]
    names = ("accuracy", "accuracy_stderr", "score_mean", "score_mean_stderr", "samples")
    evaluation = {f"eval/{name}": 1.0 for name in names}
    with caplog.at_level(logging.INFO, logger=records.__name__):
        recorder.evaluation(0, evaluation)
        for step in (1, 2):
            recorder.step(step, {"time/step": 2.0, "tokens/generated": 10.0}, engines)
        recorder.close()
    assert [record["label"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [label] * 3
    lines = capsys.readouterr().out.splitlines()[1:]
    assert len(lines) == 2 and all(line.endswith(label) for line in lines)
    assert caplog.messages[0].endswith(f"(1 samples), {label}")
    assert recorder.title == f"grpo, toy, {label}"


def test_a_figure_that_cannot_be_drawn_is_one_line_and_costs_the_run_nothing(
    tmp_path, monkeypatch, caplog, capsys
):
    def full(self, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", full)
    recorder = recorder_of(config(tmp_path), 1)
    recorder.step(
        1,
        {"time/step": 2.0, "tokens/generated": 10.0},
        [{"generation_s": 1.0, "exposed_grading_s": 0.0, "drafts": 0, "accepted": 0}],
    )
    recorder.close()
    assert caplog.messages.count(caplog.messages[0]) == 2, "by the thread and at the end"
    assert "figure.png could not be drawn: [Errno 28] No space left" in caplog.messages[0].replace(
        str(tmp_path), ""
    )
    assert (
        "Traceback" not in capsys.readouterr().err
        and len(read_metrics(tmp_path / "metrics.jsonl")) == 1
    )
    (tmp_path / "metrics.jsonl").unlink()  # with the run's folder
    recorder.draw(wait=True)
    assert "metrics.jsonl cannot be read: No such file" in caplog.messages[-1]


def test_drafts_are_counted_over_all_engines():
    engines = [
        {"generation_s": 1.0, "exposed_grading_s": 0.0, "drafts": drafts, "accepted": accepted}
        for drafts, accepted in ((30, 40), (10, 0))
    ]
    logs = {"time/step": 2.0, "tokens/generated": 10.0}
    assert records.step_record(logs, engines)["rollout/accepted"] == 1.0
    assert "rollout/accepted" not in records.step_record(logs, [engines[0] | {"drafts": 0}])


def test_groups_that_were_dropped_or_late_are_events_of_their_step(tmp_path):
    engines = [{"generation_s": 1.0, "exposed_grading_s": 0.0, "drafts": 0, "accepted": 0}]
    gone = [(2.0, 0.0, 0.0), (2.0, 0.0, 0.0), (5.0, 1.0, 0.0), (5.0, 1.0, 3.0)]
    told = {}
    for resume_step in (0, 10):
        path = tmp_path / f"events{resume_step}.jsonl"
        with EventLog(path) as events:
            recorder = recorder_of(config(tmp_path), 4, resume_step, events)
            for events.step, (filtered, late, trained_late) in enumerate(
                gone, start=resume_step + 1
            ):
                counts = {"groups/dropped_filtered": filtered, "groups/dropped_late": late}
                logs = {
                    "time/step": 2.0,
                    "tokens/generated": 10.0,
                    "groups/trained_late": trained_late,
                    **counts,
                }
                recorder.step(events.step, logs, engines)
            recorder.close()
        told[resume_step] = [
            {k: v for k, v in record.items() if k != "time"} for _, record in read_lines(path)
        ]
    first, third, last = told[0]
    assert first == {"event": "groups_dropped", "step": 1, "filtered": 2, "late": 0}
    assert third == {"event": "groups_dropped", "step": 3, "filtered": 3, "late": 1}
    assert last == {"event": "groups_late", "step": 4, "count": 3}
    assert [record["step"] for record in told[10]] == [13, 14], (
        "counts of the part before are not known"
    )

"""Bands of trusted runs: what leaves them is told, other runs of the recipe stay inside, other
files are refused."""

from __future__ import annotations

import json
import logging
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import curves
from openrlhf_ext.cli import report
from openrlhf_ext.config import RunConfig, load_config
from openrlhf_ext.config.load import load
from openrlhf_ext.config.sft import SupervisedConfig
from openrlhf_ext.config.show import shown_options
from openrlhf_ext.driver import preflight
from openrlhf_ext.inputs import InputError
from openrlhf_ext.options.table import table_of
from openrlhf_ext.reporting import EventLog, MetricsWriter
from openrlhf_ext.reporting.lines import read_lines
from openrlhf_ext.run.corridor import (
    CorridorLeft,
    Watch,
    bands_of,
    make_corridor,
    read_corridor,
    recipe,
    written,
)
from openrlhf_ext.run.records import Recorder
from tests.e2e.jobs import Task
from tests.run.test_records import recorder_of

STEPS = 4


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return Task.make(tmp_path_factory.mktemp("runs"))


def config_of(task, **more):
    return load_config(task.options("out", **more))


def record(draw: random.Random, step: int) -> dict[str, float]:
    return {
        "reward/mean": 0.4 + draw.uniform(0, 0.1),
        "grad_norm": 0.1 * draw.uniform(1, 2),
        "lr": 1e-3 * step,
        "kl/rollout": 1e-13 * draw.uniform(1, 2),
        "response/truncated_rate": 0.0,
        "time/step": draw.uniform(1, 99),
        "reward_log/own": draw.uniform(-1, 1),
    }


def evaluated(draw: random.Random) -> dict[str, float]:
    names = ("accuracy", "accuracy_stderr", "score_mean", "score_mean_stderr", "samples")
    return {f"eval/{name}": 0.3 + draw.uniform(0, 0.1) for name in names}


def make_run(folder, name, config, seed, evaluates=False):
    run = folder / name
    with EventLog(run / "events.jsonl") as events, MetricsWriter(run / "metrics.jsonl") as metrics:
        events.note("start", options=shown_options(config))
        draw = random.Random(seed)
        for step in range(1, STEPS + 1):
            metrics.write(step, record(draw, step))
            if evaluates and step == 2:
                metrics.write(step, evaluated(draw))
        events.note("end")
    return run


@pytest.fixture(scope="module")
def corridor(task):
    """The file that ``openrlhf-ext report`` makes of five runs, which differ in seed and place."""
    runs = [
        make_run(task.folder, f"trusted{n}", config_of(task, train__seed=n), n) for n in range(5)
    ]
    path = task.folder / "corridor.json"
    page = str(task.folder / "page.html")
    assert report.main([*map(str, runs), "--output", page, "--write_corridor", str(path)]) == 0
    return path


def test_another_run_of_the_recipe_is_inside(task, corridor):
    found = read_corridor(corridor)
    assert found.runs == 5 and set(found.bands) == {*record(random.Random(), 1)} - {"time/step"}
    for seed in range(100, 200):
        draw = random.Random(seed)
        for step in range(1, STEPS + 3):  # longer than the trusted ones
            assert found.left(step, record(draw, step)) == [], (seed, step)
    assert (
        found.faults(
            config_of(task, train__seed=77, ckpt__output_dir="elsewhere", vllm__num_engines=2)
        )
        == []
    )


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("reward/mean", 0.9),
        ("grad_norm", 0.9),
        ("lr", 1.1e-3),
        ("kl/rollout", 1e-6),
        ("response/truncated_rate", 0.2),
        ("reward_log/own", -9.0),
        ("grad_norm", None),
        ("grad_norm", float("nan")),
        ("reward/mean", float("inf")),
    ],
)
def test_what_leaves_is_told_with_its_band_and_likely_causes(
    corridor, tmp_path, caplog, metric, value
):
    changed = {**record(random.Random(7), 1), metric: value}
    if value is None:
        del changed[metric]
    with EventLog(tmp_path / "events.jsonl") as events, caplog.at_level(logging.WARNING):
        watch = Watch(str(corridor), "warn", events)
        watch.look(1, changed)
        watch.look(1, changed)
    assert sum(metric in line.getMessage() for line in caplog.records) == 1, (
        "said once, written every time"
    )
    told = [event for _, event in read_lines(tmp_path / "events.jsonl")]
    assert [list(event["metrics"]) for event in told] == [[metric], [metric]]
    low, high = read_corridor(corridor).bands[metric][0]
    assert (told[0]["metrics"][metric]["low"], told[0]["metrics"][metric]["high"]) == (low, high)
    with EventLog() as events, pytest.raises(CorridorLeft, match=f"(?s)5 trusted runs.*{metric}"):
        Watch(str(corridor), "fail", events).look(1, changed)


@given(st.lists(st.floats(1e-9, 1e9), min_size=3, max_size=20))
def test_bands_hold_what_they_are_made_of(values):
    from openrlhf_ext.run.corridor import _band

    for metric in ("grad_norm", "reward/mean", "kl/rollout", "accuracy/mean"):
        low, high = _band(metric, values, signed=False)
        assert all(low <= value <= high for value in values)
        low, high = _band(metric, [-value for value in values], signed=True)
        assert all(low <= -value <= high for value in values)


def test_a_metric_that_is_negative_at_another_step_may_be_so_here():
    name = "entropy/surprise_correlation"
    runs = [
        {1: {name: 0.001 * n}, 2: {name: 0.002}, 3: {name: 0.004 * n}, 4: {name: -0.1}}
        for n in (1, 2, 3)
    ]
    (low, high), *_ = bands_of(name, runs, 4)
    assert low < 0 < high
    positive = [{step: {name: abs(each[name])} for step, each in run.items()} for run in runs]
    (low, high), *_ = bands_of(name, positive, 4)
    assert 0 < low < 0.001


def test_advantages_that_are_not_divided_by_the_deviation_leave():
    runs = [{1: {"advantage/group_rms": 0.935, "advantage/group_mean_abs": 1e-9}}] * 3
    low, high = bands_of("advantage/group_rms", runs, 1)[0]
    assert low > 0.39
    low, high = bands_of("advantage/group_mean_abs", runs, 1)[0]
    assert low < -1e-9 and high == pytest.approx(1e-8)


def test_runs_that_agree_at_one_step_by_chance_leave_it_room():
    """A count of 0 in all of them, where the steps beside it have some; a rate that all have has
    neither."""
    name = "algorithm/degenerate_groups"
    counts = [(0.0, 0.0, 0.0625 * (number > 2)) for number in range(5)]
    runs = [
        {step: {name: count, "lr": 1e-3 * step} for step, count in enumerate(each, 1)}
        for each in counts
    ]
    first, second, third = bands_of(name, runs, 3)
    assert first == pytest.approx((-0.03, 0.03)) and second == third == pytest.approx(
        (-0.125, 0.1875)
    )
    assert bands_of("lr", runs, 3)[1] == pytest.approx((2e-3, 2e-3), rel=1e-5)


def test_rounding_is_bounded_and_not_spread():
    """Exactly 0 in one run, 1e-17 to 1e-15 in others, as the first update's distance from the
    reference."""
    name = "algorithm/ref_kl"
    runs = [{1: {name: value}} for value in (0.0, 1e-17, 1e-16, 1e-15, 3e-16)]
    assert bands_of(name, runs, 1)[0] == pytest.approx((-1e-9, 1e-9), rel=1e-5)
    assert bands_of(name, runs[1:], 1)[0] == pytest.approx((-1e-9, 1e-9), rel=1e-5)
    grown = [{**run, 2: {name: 1e-5}} for run in runs[1:]]
    assert bands_of(name, grown, 2)[0] == pytest.approx((-2e-5, 3e-5), rel=1e-3)


def test_what_belongs_to_deadlines_machine_and_layout_may_differ(task, corridor, tmp_path):
    """Of a file that an earlier release made, too, which has such options."""
    for kind in (RunConfig, SupervisedConfig):
        named = recipe(dict.fromkeys(table_of(kind)))
        assert not [name for name in named if name.endswith("timeout_s")]
        assert not named.keys() & {
            "train.micro_batch_size",
            "train.max_minutes",
            "vllm.sync_backend",
            "megatron.sequence_parallel_enable",
            "rollout.micro_batch_size",
            "train.max_tokens_per_gpu",
            "train.dynamic_batch_enable",
            "train.colocate_all",
            "megatron.decoder_first_pipeline_num_layers",
            "vllm.gpu_memory_utilization",
            "vllm.enforce_eager",
            "actor.gradient_checkpointing_enable",
            "megatron.distributed_optimizer_enable",
        }
        prefix = "actor." if kind is RunConfig else ""
        assert named.keys() > {
            f"{prefix}adam.lr",
            f"{prefix}max_norm",
            "train.batch_size",
            "megatron.param_dtype",
            "data.max_len",
            "ds.lora.rank",
            "fp8.enable",
            "eval.steps",
            "train.max_epochs",
        }
    content = json.loads(corridor.read_text())
    content["options"] |= {
        "reward.timeout_s": 30,
        "train.micro_batch_size": 99,
        "vllm.sync_backend": "nccl",
    }
    (tmp_path / "older.json").write_text(json.dumps(content))
    changed = config_of(task, reward__timeout_s=31, rollout__timeout_s=61, train__max_minutes=5)
    assert read_corridor(tmp_path / "older.json").faults(changed) == []


def test_a_run_compares_its_steps(task, corridor, caplog):
    config = config_of(
        task, train__corridor=corridor, logger__metrics_path=task.folder / "watched/metrics.jsonl"
    )
    recorder = Recorder(config, STEPS, 0, EventLog())
    with caplog.at_level(logging.WARNING):
        recorder.write(1, record(random.Random(3), 1))
        recorder.write(2, {**record(random.Random(4), 2), "grad_norm": 7.0})
    recorder.close()
    (told,) = [line.getMessage() for line in caplog.records if "corridor" in line.getMessage()]
    assert (
        "step 2 is outside" in told
        and "grad_norm is 7, trusted runs" in told
        and "the loss is scaled" in told
    )


def test_evaluations_are_compared_and_steps_lack_nothing_of_them(task, tmp_path):
    runs = [make_run(tmp_path, str(n), config_of(task), n, evaluates=True) for n in range(5)]
    path, draw = tmp_path / "evaluated.json", random.Random(3)
    path.write_text(written(make_corridor(runs)))
    more = {"train__corridor": path, "train__corridor_action": "fail"}
    recorder = recorder_of(
        config_of(task, logger__metrics_path=tmp_path / "watched/metrics.jsonl", **more), STEPS
    )
    recorder.write(2, record(draw, 2))
    recorder.evaluation(2, evaluated(draw))
    # the trusted runs have none there
    recorder.evaluation(3, {**evaluated(draw), "eval/accuracy": 0.9})
    with pytest.raises(
        CorridorLeft, match="step 2 .*5 trusted runs(?s:.*)eval/accuracy is 0.9, trusted runs 0"
    ):
        recorder.evaluation(2, {**evaluated(draw), "eval/accuracy": 0.9})
    recorder.close()


def test_files_of_other_recipes_metrics_and_kinds_are_refused_by_name(task, corridor, tmp_path):
    def refused(path, **more):
        config = config_of(task, train__corridor=path, **more)
        return "\n".join(
            v.message
            for v in preflight.findings(config).violations
            if "train.corridor" in v.options
        )

    assert refused(corridor) == ""
    told = refused(corridor, rollout__temperature=0.5, actor__adam__lr=1e-4)
    assert "rollout.temperature is 0.5, in the trusted runs 1" in told and "actor.adam.lr" in told
    other = json.loads(corridor.read_text())
    other["bands"]["renamed/metric"] = other["bands"].pop("grad_norm")
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert "renamed/metric, which are not measured any more" in refused(tmp_path / "other.json")
    (tmp_path / "none.json").write_text("[]")
    assert "must be a JSON object" in refused(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text(corridor.read_text()[:-9])
    assert (
        "not JSON" in (told := refused(tmp_path / "cut.json"))
        and "make it anew: openrlhf-ext report" in told
    )
    runs = [make_run(tmp_path, str(n), config_of(task), n, evaluates=True) for n in range(5)]
    (tmp_path / "evaluated.json").write_text(written(make_corridor(runs)))
    assert "eval.dataset is None, and the trusted runs have bands of eval" in refused(
        tmp_path / "evaluated.json"
    )
    (tmp_path / "short.json").write_text(
        json.dumps({**other, "bands": {"lr": {"low": [1], "high": []}}})
    )
    assert "as many" in refused(tmp_path / "short.json")
    known = json.loads(corridor.read_text())
    for change, said in (
        ({"bands": {}}, "bands of no step"),
        ({"runs": 4}, "of less than 5 runs"),
        ({"bands": {"lr": {"low": [None] * STEPS, "high": [1] * STEPS}}}, "bands of no step"),
        (
            {"bands": {"lr": {"low": [2] * STEPS, "high": [1] * STEPS}}},
            "low is above high in the bands of lr",
        ),
        (
            {"bands": {"time/step": {"low": [1] * STEPS, "high": [2] * STEPS}}},
            "time/step, which are not measured",
        ),
    ):
        (tmp_path / "changed.json").write_text(json.dumps(known | change))
        assert said in refused(tmp_path / "changed.json")
    assert "absent.json cannot be read: No such file" in refused(tmp_path / "absent.json")


def test_only_whole_runs_of_one_recipe_make_a_corridor(task, corridor, tmp_path):
    runs = [task.folder / f"trusted{n}" for n in range(5)]
    assert written(make_corridor(runs)) == corridor.read_text()
    with pytest.raises(InputError, match="at least 5 trusted runs"):
        make_corridor(runs[:4])
    with pytest.raises(InputError, match="each once; got 5 of 6 folders"):
        make_corridor([*runs, runs[0].parent / "x/.." / runs[0].name])
    failed = make_run(tmp_path, "failed", config_of(task), 9)
    with EventLog(failed / "events.jsonl", goes_on=True) as events:
        events.note("failure")
    with pytest.raises(InputError, match="failed/events.jsonl tells of no end in order"):
        make_corridor([*runs, failed])
    other = make_run(tmp_path, "other", config_of(task, rollout__temperature=0.5), 9)
    with pytest.raises(InputError, match="another recipe than .*rollout.temperature differ"):
        make_corridor([*runs, other])
    cut = make_run(tmp_path, "cut", config_of(task), 9)
    lines = (cut / "metrics.jsonl").read_text().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(InputError, match="has 3 steps, .* has 4"):
        make_corridor([*runs, cut])
    gaps = [make_run(tmp_path, f"gap{seed}", config_of(task), seed) for seed in range(5)]
    for gap in gaps:
        lines = (gap / "metrics.jsonl").read_text().splitlines(keepends=True)
        (gap / "metrics.jsonl").write_text("".join(lines[:1] + lines[2:]))
    with pytest.raises(InputError, match="gap0/metrics.jsonl lacks steps: it has 3, up to 4"):
        make_corridor(gaps)
    assert report.main([*map(str, runs), "--write_corridor", str(runs[0] / "metrics.jsonl")]) == 2
    assert (runs[0] / "metrics.jsonl").stat().st_size > 0 and not (runs[0] / "report.html").exists()
    assert "train.seed" not in recipe(shown_options(config_of(task)))


def test_an_evaluation_is_compared_with_evaluations_and_a_step_with_steps(task, tmp_path, caplog):
    """They have records of their own: nothing of one is missing in the other."""
    config, runs = config_of(task), []
    for seed in range(5):
        runs.append(make_run(tmp_path, f"run{seed}", config, seed))
        with MetricsWriter(runs[-1] / "metrics.jsonl", STEPS) as metrics:
            metrics.write(2, {"eval/accuracy": 0.5 + 0.01 * seed, "time/eval": 1.0})
    path = tmp_path / "corridor.json"
    path.write_text(written(make_corridor(runs)))
    bands = read_corridor(path).bands["eval/accuracy"]
    assert [band is None for band in bands] == [True, False, True, True]
    found = read_corridor(path)
    assert found.left(2, record(random.Random(1), 2)) == []
    assert found.left(2, {"eval/accuracy": 0.51, "time/eval": 9.0}) == []
    assert [left.metric for left in found.left(2, {"eval/accuracy": 0.1, "time/eval": 9.0})] == [
        "eval/accuracy"
    ]
    config = config_of(
        task, train__corridor=path, logger__metrics_path=tmp_path / "watched/metrics.jsonl"
    )
    recorder = recorder_of(config, STEPS)
    with caplog.at_level(logging.WARNING):
        recorder.write(2, record(random.Random(3), 2))
        assert not caplog.records
        numbers = {
            "eval/accuracy": 0.1,
            "eval/accuracy_stderr": 0.1,
            "eval/samples": 9.0,
            "eval/score_mean": 0.1,
            "eval/score_mean_stderr": 0.1,
        }
        recorder.evaluation(2, numbers)
    recorder.close()
    assert [line for line in caplog.messages if "eval/accuracy is 0.1, trusted runs" in line]


@pytest.mark.parametrize("name", sorted(path.stem for path in curves.CORRIDORS.glob("*.json")))
def test_frozen_corridors_are_of_the_recipes_as_they_are(name, tmp_path):
    command = curves.RECIPES[name].command(tmp_path, tmp_path, tmp_path / "out")
    kind = SupervisedConfig if "train_sft" in command[2] else RunConfig
    frozen = read_corridor(curves.CORRIDORS / f"{name}.json")
    assert frozen.faults(load(kind, command[3:], [])) == [], (
        "python benchmarks/curves.py makes new ones"
    )
    # an option that the trusted runs did not have yet counts as its default
    eps = "adam.eps" if kind is SupervisedConfig else "actor.adam.eps"
    del frozen.options[eps]
    assert frozen.faults(load(kind, command[3:], [])) == []
    (fault,) = frozen.faults(load(kind, [*command[3:], f"--{eps}", "0.5"], []))
    assert fault == f"{eps} is 0.5, in the trusted runs 1e-08"

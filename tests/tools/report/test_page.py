"""The page about runs, in a browser, and the command that makes it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from openrlhf_ext.cli.report import main
from openrlhf_ext.reporting import METRICS, read_metrics
from openrlhf_ext.tools.report.page import BUCKETS, moving_mean, page_data, thinned, write_page
from openrlhf_ext.tools.report.read import read_runs
from tests.tools.report.browser import CHROMIUM, Browser
from tests.tools.report.runs import HOSTILE, make_run

SIZES = (1366, 390)
PLAIN = [m.name for m in METRICS if not m.name.endswith("/*") and m.name not in ("step", "time", "nonfinite", "label")]
# every chart that is in an open part of the page has been seen, so it is drawn
DRAWN = """(async () => {
    document.querySelectorAll("details").forEach(d => d.open = true);
    for (let y = 0; y < document.documentElement.scrollHeight; y += 700) {
        scrollTo(0, y);
        await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    }
    const charts = [...document.querySelectorAll("figure[data-metric]")];
    return charts.map(c => [c.dataset.metric, ...[...c.querySelectorAll("path")].map(p => p.getAttribute("d").length)]);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium: install Debian's package chromium (examples/scripts/setup_env.sh dev does as root)")
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def three_long_runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = [
        {"actor.adam.lr": 1e-6},
        {"actor.adam.lr": 2e-6, "data.prompt_dataset": HOSTILE},
        {"actor.adam.lr": 1e-6},
    ]
    named = [f"loss/extra{i}" for i in range(max(0, len(PLAIN) - 17))]  # as many curves as there are metrics
    return [
        make_run(folder / f"run{i}", 2000, seed=i, ranks=16, names=named, options=options[i]) for i in range(3)
    ]  # fmt: skip


def test_three_runs_of_2000_steps_on_one_page(browser, three_long_runs, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main([*map(str, three_long_runs), "--output", str(page)]) == 0
    assert page.stat().st_size < 5 * 2**20
    for width in SIZES:
        browser.open(page, width)
        drawn = browser.value(DRAWN)
        assert len(drawn) > 90 and len({name for name, *_ in drawn}) > 80
        for name, *paths in drawn:
            assert len([length for length in paths if length > 300]) == 6, f"{name}: raw and smooth of three runs"
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), f"scrolls sideways at {width}"
    assert browser.messages == []
    assert set(browser.requests) == {page.as_uri()}
    assert browser.value("document.querySelectorAll('img, main script').length") == 0
    assert browser.value("document.title").startswith("Report: run0")
    text = browser.value("document.querySelector('#completions').innerText")
    assert HOSTILE in text, "shown as it is"
    text = browser.value("document.body.innerText")
    for part in ("Bold: mean of the last 100", "the largest value in each of 150", "RuntimeError: CUDA error",
                 "3 groups dropped, filtered", "communication"):  # fmt: skip
        assert part in text, part


def test_colors_choices_and_keys(browser, three_long_runs, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs(three_long_runs[:2])))
    browser.open(page, 1366)
    colors = "new Set([...document.querySelectorAll('.tokens span')].map(s => s.style.background)).size"
    by_entropy = browser.value(colors)
    assert by_entropy > 8
    browser.value("{const b = document.querySelector('[aria-label=\"Color by\"]'); b.value='advantages'; b.onchange()}")
    legend = browser.value("document.querySelector('#completions .legend').innerText")
    assert browser.value(colors) > 8 and "advantage (blue: made likelier" in legend and "-" in legend
    rows = "[...document.querySelectorAll('#configuration tr.differs')].map(r => r.innerText)"
    differing = browser.value(rows)
    assert len(differing) == 2 and differing[0].split() == ["actor.adam.lr", "1e-06", "2e-06"]
    browser.value("scrollTo(0, 0); document.querySelector('.plot').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    assert "step 1" in browser.value("document.querySelector('.read').textContent"), "arrow keys read values"
    assert browser.messages == []


def test_a_run_that_goes_on_and_older_runs(browser, tmp_path, capsys):
    """A torn line at the end of every file; runs without events, or without anything but a first line."""
    torn, old, new = (
        make_run(tmp_path / "torn"),
        make_run(tmp_path / "old", samples=False, events=False),
        tmp_path / "new",
    )
    for name in ("metrics", "events", "samples"):
        with (torn / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 41, "rew')
    new.mkdir()
    (new / "metrics.jsonl").write_text('{"st')
    page = tmp_path / "report.html"
    assert main([str(torn), str(old), str(new), "--output", str(page), "--smooth", "1"]) == 0
    told = capsys.readouterr().err
    browser.open(page, 390)
    shown = browser.value("document.querySelector('#missing').innerText")
    for sentence in ("old: The folder holds no events.jsonl", "old: The folder holds no samples.jsonl: no completions",
                     "new: metrics.jsonl is still empty"):  # fmt: skip
        assert sentence in shown and sentence in told
    assert "end not known" in browser.value("document.querySelector('.runs').innerText")
    assert browser.value("document.querySelectorAll('path.smooth').length") == 0, "--smooth 1 draws the values"
    assert browser.messages == []


# ---- without a browser


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path, capsys):
    make_run(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "run"), str(tmp_path / "empty"), str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert "empty is not the folder of a run: it holds no metrics.jsonl" in told and "there is no such folder" in told
    assert not (tmp_path / "run/report.html").exists()
    (tmp_path / "run/metrics.jsonl").write_text("{}\nbroken\n")
    assert main([str(tmp_path / "run")]) == 2
    assert "metrics.jsonl, line 1: needs step, has no keys" in capsys.readouterr().err


def test_a_broken_file_beside_the_metrics_is_said_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / "run", 5)
    (folder / "events.jsonl").write_text('{"event": "start"}\n{"event": "end", "step": 5, "time": 1.0}\n')
    (folder / "samples.jsonl").write_text("[]\n")
    (run,) = read_runs([folder])
    assert [event["event"] for event in run.events] == ["end"] and run.state == "finished" and run.samples == []
    left_out = "events.jsonl has lines that cannot be used and are left out: 1, first line 1: needs step, time"
    assert any(left_out in sentence for sentence in run.missing)
    assert any("samples.jsonl, line 1: must be a JSON object, got a list" in sentence for sentence in run.missing)


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        ("metrics.jsonl", {"reward/mean": "high"}, "reward/mean must be a number, got 'high'"),
        ("metrics.jsonl", {"time": "now"}, "time must be a finite number, got 'now'"),
        ("metrics.jsonl", {"nonfinite": {"reward/mean": [1]}}, "nonfinite must be a map, each value nan, inf or -inf"),
        ("metrics.jsonl", {"nonfinite": {"step": "nan"}}, "step must be an integer, got nan"),
        ("metrics.jsonl", {"time/step": 10**400}, "not JSON that can be read: an integer of 401 digits"),
        ("events.jsonl", {"event": []}, "event must be a text"),
        ("events.jsonl", {"event": "start", "options": [1]}, "options must be a map, got [1]"),
        ("events.jsonl", {"event": "start", "set": 3}, "set must be a list, each entry a text, got 3"),
        ("events.jsonl", {"event": "evaluation", "accuracy": "all"}, "accuracy must be a finite number"),
        ("events.jsonl", {"event": "groups_late", "count": "x"}, "count must be an integer"),
        ("samples.jsonl", {"tokens": [1]}, "tokens must be a list, each entry a text"),
        ("samples.jsonl", {"entropies": ["x"]}, "entropies must be a list, each entry a finite number, or null"),
        ("samples.jsonl", {"reward": [1]}, "reward must be a finite number"),
    ],
)
def test_values_of_a_wrong_type_are_named_with_their_line(tmp_path, capsys, file, changes, complaint):
    """Of the metrics they are refused; of what stands beside them they are left out, which is said."""
    folder = make_run(tmp_path / "run", 5)
    if not (folder / file).exists():
        (folder / file).write_text("")
    with (folder / file).open("a") as opened:
        record = {"step": 5, "time": 1.0, "group": 1, "tokens": ["a"], **changes}
        if file == "metrics.jsonl":
            del record["tokens"], record["group"]
        opened.write(json.dumps(record) + "\n")
    status = main([str(folder)])
    told = capsys.readouterr().err
    assert complaint in told and "line " in told and "Traceback" not in told
    assert status == (2 if file == "metrics.jsonl" else 0)


def test_thinned_curves_keep_every_extreme_and_gap():
    values = list(np.sin(np.arange(5000) / 7))
    values[3210], values[17] = 55.0, -44.0
    values[1000:1100] = [math.nan] * 100
    points = thinned(range(5000), values)
    assert len(points) <= 2 * BUCKETS and [3210, 55] in points and [17, -44] in points
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert any(y is None and 1000 <= x < 1100 for x, y in points)
    assert thinned(range(3), [1.0, math.nan, 2.0]) == [[0, 1], [1, None], [2, 2]], "a short curve stays as it is"


def test_the_moving_mean_leaves_out_what_is_not_finite():
    assert moving_mean([1.0, math.nan, 3.0, math.inf], 2) == [1.0, 1.0, 3.0, 3.0]
    assert math.isnan(moving_mean([math.nan], 3)[0])


def test_phases_add_up_to_the_step_and_the_last_state_counts(tmp_path):
    folder = make_run(tmp_path / "run", 400)
    (run,) = read_runs([folder])
    assert run.state == "finished", "it failed, and was restarted"
    data = page_data([run], None, now=lambda: 0.0)
    phases, steps = (
        data["phases"][0],
        [r["time/step"] for r in read_metrics(folder / "metrics.jsonl") if "time/step" in r],
    )
    assert sum(phases["mean"]) == pytest.approx(sum(steps) / len(steps), rel=1e-3)
    assert len(phases["rows"]) <= BUCKETS and phases["names"][-1] == "other"
    json.dumps(data, allow_nan=False)
    kept = data["samples"][0]
    assert kept["steps"][0]["step"] == 1 and kept["steps"][-1]["step"] == 400 and kept["left_out"] >= 0

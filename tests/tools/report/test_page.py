"""The page about runs, in a browser, and the command that makes it."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from openrlhf_ext.cli.report import main
from openrlhf_ext.reporting import METRICS, MetricsWriter, read_metrics
from openrlhf_ext.run.ledger import Audit
from openrlhf_ext.tools.report.page import (
    _HEADLINES,
    BUCKETS,
    page_data,
    read_runs,
    thinned,
    write_page,
)
from tests.tools.report.browser import CHROMIUM, Browser
from tests.tools.report.runs import HOSTILE, make_run

SIZES = (1366, 390)
PLAIN = [
    m.name
    for m in METRICS
    if not m.name.endswith("/*") and m.name not in ("step", "time", "nonfinite", "label")
]
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

# what stands below the curves, after the next frame
READ = """new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(
    [...document.querySelectorAll("#curves .read")].map(e => e.innerText.trim().split(/\\s+/))))))"""
# where the first plot is, in the middle of the window; a plot that comes into view is drawn in the
# next frames
PLOT = """new Promise(done => {
    const plot = document.querySelector("#curves .plot");
    plot.scrollIntoView({block: "center"});
    const frame = left => left ? requestAnimationFrame(() => frame(left - 1)) : done(plot.getBoundingClientRect());
    frame(3);
}).then(box => [box.x, box.y, box.width, box.height])"""
# what a click on the button of a curve's file saves
SAVED = """(() => {
    let text = "";
    const whole = Blob;
    window.Blob = class extends whole { constructor(parts, how) { super(parts, how); text = parts.join(""); } };
    document.querySelector("[data-metric='eval/accuracy'] button").click();
    window.Blob = whole;
    return text;
})()"""
# the least contrast of a text's or a curve's color with the paper, as WCAG counts it
CONTRAST = """(() => {
    const light = text => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(${text})`;
        const parts = getComputedStyle(probe).color.match(/[0-9.]+/g).slice(0, 3).map(v => v / 255);
        probe.remove();
        const [r, g, b] = parts.map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
    };
    const names = ["--ink", "--soft", "--accent", "--bad", "--good", "--c0", "--c1", "--c2", "--c3", "--c4"];
    const paper = light("--paper");
    return Math.min(...names.map(light).map(v => Math.max(v, paper) / Math.min(v, paper)));
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip(
            "no Chromium: install Debian's package chromium (examples/scripts/setup_env.sh dev "
            "does as root)"
        )
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def three_long_runs(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    options = [
        {"actor.adam.lr": 1e-6},
        {"actor.adam.lr": 2e-6, "data.prompt_dataset": HOSTILE},
        {"actor.adam.lr": 3e-6},
    ]
    # as many curves as there are metrics
    named = [f"loss/extra{i}" for i in range(max(0, len(PLAIN) - 17))]
    return [
        make_run(folder / f"run{i}", 2000, seed=i, ranks=16, names=named, options=options[i])
        for i in range(3)
    ]


def test_three_runs_of_2000_steps_on_one_page(browser, three_long_runs, tmp_path, capsys):
    page = tmp_path / "report.html"
    assert main([*map(str, three_long_runs), "--output", str(page)]) == 0
    assert page.stat().st_size < 5 * 2**20
    for width in SIZES:
        browser.open(page, width)
        drawn = browser.value(DRAWN)
        assert len(drawn) > 90 and len({name for name, *_ in drawn}) > 80
        for name, *paths in drawn:
            long = [length for length in paths if length > 300]
            assert len(long) == 6, (
                f"{name}: of three runs the values, and their means or standard errors"
            )
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), (
            f"scrolls sideways at {width}"
        )
    assert browser.messages == []
    assert set(browser.requests) == {page.as_uri()}
    assert browser.value("document.querySelectorAll('img, main script').length") == 0
    assert browser.value("document.title").startswith("Report: run0")
    text = browser.value("document.querySelector('#completions').innerText")
    assert HOSTILE in text, "shown as it is"
    text = browser.value("document.body.innerText")
    for part in (
        "Bold: mean of the last 100",
        "the largest value in each of 150",
        "RuntimeError: CUDA error",
        "3 groups dropped, filtered",
        "communication",
    ):
        assert part in text, part


def test_each_held_out_set_is_a_curve_and_pass_at_k_is_drawn_over_k_and_over_training(
    browser, tmp_path
):
    run = make_run(tmp_path / "run", 40)
    with MetricsWriter(run / "metrics.jsonl", resume_step=40) as metrics:
        for step in (41, 42, 43):
            metrics.write(
                step,
                {
                    f"eval/{name}/{metric}": (step - 40) / 4 * (metric != "accuracy_stderr")
                    for name in ("aime24", "math500")
                    for metric in (
                        "accuracy",
                        "accuracy_stderr",
                        "pass@1",
                        "pass@2",
                        "pass@16",
                        "maj@2",
                    )
                }
                | {
                    "eval/accuracy": 0.5,
                    "eval/accuracy_stderr": 0.1,
                    "entropy/completion_mean": 0.2,
                },
            )
    data = page_data(read_runs([run]), None, lambda: 1.8e9)
    assert [name for name in data["key"] if "accuracy" in name] == [
        "accuracy/mean",
        "eval/accuracy",
        "eval/aime24/accuracy",
        "eval/math500/accuracy",
    ]
    meanings = {chart["name"]: chart for chart in data["charts"]}
    assert meanings["eval/aime24/pass@16"]["meaning"].startswith("eval/pass@K, K = powers of two")
    assert meanings["entropy/completion_mean"]["level"] == [pytest.approx(0.6931, abs=1e-4), "ln 2"]
    aime = next(plot for plot in data["at_k"] if plot["title"] == "pass@k of aime24")
    assert [(line["step"], line["first"]) for line in aime["lines"]] == [(41, True), (43, False)]
    assert aime["lines"][1]["points"] == [[1, 0.75], [2, 0.75], [16, 0.75]]
    assert data["at_k_curves"][:3] == [
        "eval/aime24/pass@1",
        "eval/aime24/pass@2",
        "eval/aime24/pass@16",
    ]

    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs([run])))
    browser.open(page, 1366)
    browser.value("document.querySelector('#at-k').scrollIntoView()")
    assert browser.value("document.querySelectorAll('#at-k [data-metric]').length") == 4 + 8
    assert "0.75 (16)" in browser.value(
        "document.querySelector('[data-metric=\"eval/aime24/pass@k\"]').innerText"
    )
    assert browser.messages == []


def test_every_headline_has_words_and_an_option_of_one_command_is_no_difference(tmp_path):
    labels = re.search(
        r"const labels = (\{.*?\});", write_page(read_runs([make_run(tmp_path / "one", 4)])), re.S
    )[1]
    assert set(json.loads(labels)) == set(_HEADLINES)
    options = (
        {"train.seed": 1, "model.aux": 0, "data.dataset": "a"},
        {"train.seed": 2, "rollout.top_p": 1.0},
        {},
    )
    runs = [make_run(tmp_path / f"run{i}", 4, options=given) for i, given in enumerate(options)]
    read = read_runs(runs)
    for run, given in zip(read, (["data.dataset"], [], []), strict=True):
        run.start["set"] = given
    read[2].start["options"] = {}
    rows = {
        row["name"]: (row["values"], row["differs"])
        for row in page_data(read, None, lambda: 1.8e9)["options"]
    }
    absent = "no such option"
    assert rows | {"algo.advantage.estimator": None} == {
        "algo.advantage.estimator": None,
        "train.seed": (["1", "2", None], True),
        "model.aux": (["0", absent, None], False),
        "data.dataset": (["a", absent, None], True),
        "rollout.top_p": ([absent, "1.0", None], False),
    }


def test_options_of_several_starts_have_their_steps(tmp_path):
    run = read_runs(
        [
            make_run(
                tmp_path / "run", 4, options={"algo.advantage.estimator": "grpo", "train.seed": 1}
            )
        ]
    )[0]
    (first,) = [event for event in run.events if event["event"] == "start"]
    other = first["options"] | {"algo.advantage.estimator": "dapo"}
    run.events.append(first | {"resume_step": 2, "options": other})
    data = page_data([run], None, lambda: 1.8e9)
    assert data["runs"][0]["about"].startswith("grpo (steps 1 to 2), dapo (from step 3)")
    rows = {row["name"]: (row["values"], row["differs"]) for row in data["options"]}
    assert rows["algo.advantage.estimator"] == (["grpo (steps 1 to 2), dapo (from step 3)"], True)
    assert rows["train.seed"] == (["1"], False)


def test_colors_choices_and_keys(browser, tmp_path):
    page = tmp_path / "report.html"
    options = ({"actor.adam.lr": 1e-6}, {"actor.adam.lr": 2e-6, "data.prompt_dataset": HOSTILE})
    runs = [
        make_run(tmp_path / f"run{i}", 40, seed=i, options=given) for i, given in enumerate(options)
    ]
    page.write_text(write_page(read_runs(runs)))
    browser.open(page, 1366)
    colors = (
        "new Set([...document.querySelectorAll('.tokens span')].map(s => s.style.background)).size"
    )
    by_entropy = browser.value(colors)
    assert by_entropy > 8
    browser.value(
        "{const b = document.querySelector('[aria-label=\"Color by\"]'); b.value='advantages'; "
        "b.onchange()}"
    )
    legend = browser.value("document.querySelector('#completions .legend').innerText")
    assert (
        browser.value(colors) > 8 and "advantage (blue: made likelier" in legend and "-" in legend
    )
    rows = "[...document.querySelectorAll('#configuration tr.differs')].map(r => r.innerText)"
    differing = browser.value(rows)
    assert len(differing) == 2 and differing[0].split() == ["actor.adam.lr", "1e-06", "2e-06"]
    browser.value("scrollTo(0, 0); document.querySelector('#curves .plot').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    assert browser.value(READ)[0][:2] == ["step", "37"], "arrow keys read values"
    assert browser.messages == []


def test_every_curve_shows_the_same_step_and_the_same_part_of_the_run(browser, tmp_path):
    """At both widths, light and dark: the cursor, a drag, Escape, logarithms where they exist, the
    axis of time."""
    page = tmp_path / "report.html"
    runs = [
        make_run(tmp_path / f"run{i}", 40, seed=i, options={"actor.adam.lr": 1e-6 * (1 + i)})
        for i in range(2)
    ]
    page.write_text(write_page(read_runs(runs)))
    papers = set()
    for width, scheme in itertools.product(reversed(SIZES), ("light", "dark")):
        browser.prefer(scheme)
        browser.open(page, width)
        assert browser.value("document.documentElement.scrollWidth <= innerWidth"), (
            f"scrolls sideways at {width}"
        )
        papers.add((scheme, browser.value("getComputedStyle(document.body).backgroundColor")))
        assert browser.value(CONTRAST) >= 4.5, scheme
        x, y, wide, high = browser.value(PLOT)
        middle = (x + wide / 2, y + high / 2)
        browser.drag(middle, middle)
        reads = browser.value(READ)[:3]  # what is far from the window is not drawn
        assert len({tuple(read[:2]) for read in reads}) == 1, reads
        assert reads[0][0] == "step" and 17 < int(reads[0][1]) < 25
        assert [text for text in reads[2] if text.startswith("±")] == ["±0.01"] * 2, (
            "standard errors of both runs"
        )
        assert (
            browser.value(
                "document.querySelectorAll('#curves .read')[0].querySelectorAll('.key').length"
            )
            == 2
        )
        browser.drag(middle, (x + wide * 0.8, y + high / 2))
        low, top = browser.value("view.zoom")
        assert (
            17 < low < 25 < top < 36
            and browser.value("document.querySelector('.whole').disabled") is False
        )
        ticks = (
            "[...document.querySelectorAll('#curves .plot "
            "svg')[0].querySelectorAll('text')].map(t => t.textContent)"
        )
        assert "10" not in browser.value(ticks) and "25" in browser.value(ticks)
        browser.value("document.querySelector('#curves .plot').focus()")
        browser.press("Escape")
        assert browser.value("view.zoom") is None and "10" in browser.value(ticks)
    assert len(papers) == 2, f"one paper for each scheme: {papers}"
    x, y, wide, high = browser.value(PLOT.replace("#curves", "#phases"))
    browser.drag((x + wide / 2, y + high / 2), (x + wide / 2, y + high / 2))
    assert "step" in {read[0] for read in browser.value(READ)}, (
        "curves follow the times of a step, and these each other"
    )
    crosses = (
        "[...document.querySelectorAll('#phases .cross')].map(line => "
        "line.getAttribute('visibility'))"
    )
    assert browser.value(crosses) == ["visible"] * 2
    browser.value(PLOT)
    browser.value("document.querySelector('#theme').click()")
    assert ("light", browser.value("getComputedStyle(document.body).backgroundColor")) in papers, (
        "the switch"
    )
    browser.value("document.querySelector('[type=checkbox]').click()")
    browser.value("""{const x = document.querySelector("[aria-label='x axis']");
        x.value = "time"; x.dispatchEvent(new Event("change"));}""")
    titles = browser.value(
        "[...document.querySelectorAll('#curves .title')].map(t => t.textContent)"
    )
    assert "seconds" in titles and "step" not in titles, "the runs took 43 seconds"
    assert "loss (linear: there are values of 0 or less)" in titles and "norm" in titles
    assert browser.messages == []
    browser.prefer("light")


def test_seeds_of_one_configuration_are_drawn_as_their_mean_and_a_band(browser, tmp_path):
    """Two seeds and another method: two lines, of which one has a band; without the tick three."""
    page, mine = tmp_path / "report.html", "algo.advantage.estimator"
    given = [("dapo", 1), ("dapo", 2), ("grpo", 1)]
    shares = ["algorithm/right_completions", "algorithm/right_tokens"]
    options = [
        {mine: method, "train.seed": seed, "ckpt.output_dir": f"{method}{seed}"}
        for method, seed in given
    ]
    folders = [
        make_run(tmp_path / f"run{i}", 20, seed=i, options=one, names=shares)
        for i, one in enumerate(options)
    ]
    runs = read_runs(folders)
    page.write_text(write_page(runs, smooth=1))
    browser.open(page, 1366)
    lines = """["raw", "band"].map(kind =>
        document.querySelectorAll("#curves [data-metric='reward/mean'] path." + kind).length)"""
    read = "document.querySelector(\"#curves [data-metric='reward/mean'] .read\").innerText"
    assert browser.value("SEEDS") == [[0, 1], [2]] and browser.value(lines) == [2, 1]
    last = [
        [record["reward/mean"] for record in run.records if "reward/mean" in record][-1]
        for run in runs[:2]
    ]
    numbers = [float(number) for number in re.findall(r"-?[0-9]+\.[0-9]+", browser.value(read))]
    assert numbers[:3] == pytest.approx([sum(last) / 2, min(last), max(last)], abs=2e-3)
    assert "run0 and 1 more seed" in browser.value(
        "document.querySelector('.tools .legend').innerText"
    )
    browser.value("document.querySelector('.seeds').click()")
    assert browser.value(lines) == [3, 0]
    older = [make_run(tmp_path / f"older{i}", 20, seed=i, events=False) for i in range(2)]
    page.write_text(write_page(read_runs([*folders, *older]), smooth=1))
    browser.open(page, 1366)
    assert browser.value("SEEDS") == [[0, 1], [2], [3], [4]], (
        "of runs without events no option is known"
    )
    page.write_text(write_page(runs, smooth=1))
    browser.open(page, 1366)
    table = browser.value("document.querySelector('#right table').innerText")
    assert "q, tokens" in table and table.count("run") == 4, "its head and three runs"
    assert browser.messages == []


def test_a_curve_is_saved_as_a_file(browser, tmp_path):
    """Without a request."""
    page = tmp_path / "report.html"
    runs = read_runs([make_run(tmp_path / "run", 40)])
    page.write_text(write_page(runs))
    browser.open(page, 1366)
    before = len(browser.requests)
    saved = list(csv.DictReader(io.StringIO(browser.value(SAVED))))
    logged = [r for r in runs[0].records if "eval/accuracy" in r]
    assert [(int(row["step"]), float(row["value"]), float(row["stderr"])) for row in saved] == [
        (r["step"], pytest.approx(r["eval/accuracy"], rel=1e-4), 0.01) for r in logged
    ]
    assert {row["run"] for row in saved} == {"run"} and {row["kind"] for row in saved} == {"value"}
    assert float(saved[-1]["hours"]) == pytest.approx(43 / 3600, abs=2e-5)
    assert [url for url in browser.requests[before:] if not url.startswith("blob:")] == []


def test_completions_say_what_was_asked_what_is_right_and_who_wrote_it(browser, tmp_path):
    folder = make_run(tmp_path / "run", 2)
    template = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    samples = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    for number, sample in enumerate(samples):
        sample["prompt"] = f"{template}How many are {sample['step']} apples?"
        sample["score"] = (0.0, 1.0, 0.5, None)[number]
        del sample["label"]
        if sample["step"] == 1:
            sample["label"] = {"sum": 7, "of": HOSTILE}
            sample["environment"] = [int(number == 1 and 15 <= place < 20) for place in range(45)]
    (folder / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs([folder])))
    browser.open(page, 390)
    shown = "document.querySelector('#completions').innerText"
    picked = "document.querySelector('[aria-label=Prompt] option').text"
    assert browser.value(picked) == "1 ◐ · … How many are 2 apples?"
    assert "◐ partly right" in browser.value(shown) and "reference answer" not in browser.value(
        shown
    )
    browser.value(
        "{const b = document.querySelector('[aria-label=Step]'); b.value = 0; b.onchange()}"
    )
    assert browser.value(picked) == "1 ✓ 1 ✗ · … How many are 1 apples?"
    text = browser.value(shown)
    assert "✓ 1 right" in text and "✗ 1 wrong" in text and "written by the environment" in text
    assert 'reference answer\n{"sum": 7, "of": "' + HOSTILE in text, "shown as it is"
    dim = browser.value(
        "[...document.querySelectorAll('.completion .env')].map(s => [s.textContent, "
        "s.style.background])"
    )
    assert [token for token, _ in dim] == ["<reasoning>", "first", ",", " add", " 3"] and {
        c for _, c in dim
    } == {""}
    sides = (
        "[...document.querySelectorAll('.completion .tokens')].map(t => "
        "getComputedStyle(t).borderLeftColor)"
    )
    assert len(set(browser.value(sides))) == 2
    assert browser.messages == []


# what the reader does, and what is then seen
CHOOSE = """((label, value) => {
    const box = document.querySelector(`[aria-label="${label}"]`);
    box.value = value;
    box.onchange();
})"""
PANEL = """Object.fromEntries([...document.querySelectorAll(".panel [data-of]")].map(part =>
    [part.dataset.of, part.querySelector("b").textContent]))"""
MARKED = "document.querySelector('.tokens .marked').textContent"


def test_the_worst_token_of_the_run_is_one_click_away_with_the_numbers_of_the_file(
    browser, tmp_path
):
    """By every quantity; what the panel says is what samples.jsonl has, also with the keyboard."""
    folder = make_run(tmp_path / "run", 40)
    path = folder / "samples.jsonl"
    samples = [json.loads(line) for line in path.read_text().splitlines()]
    samples[0]["rollout_logprobs"][7] = samples[0]["logprobs"][7] - 5.0000001
    samples[1]["from_guide"], samples[2]["updates"] = True, 3
    samples[1]["rollout_logprobs"] = [-90.0] * 45
    samples[3]["rollout_logprobs"][2] = None
    samples[0]["tokens"][6:8] = ["\t\u202e\u200b", "  "]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs([folder])))
    browser.open(page, 1280)
    browser.value(f"{CHOOSE}('Worst tokens of', 'run')")
    chips = "[...document.querySelectorAll('.worst .chip')].map(chip => chip.textContent)"
    listed = browser.value(chips)
    assert listed[0] == "not finite , step 2, prompt 1, completion 2, token 3"
    assert listed[1] == "+5.0000001 ·· step 1, prompt 1, completion 1, token 8", "none of the guide"
    assert len(listed) == 10
    browser.value("document.querySelectorAll('.worst .chip')[1].click()")
    assert browser.value("document.querySelector('[aria-label=Step]').value") == "0"
    assert browser.value(MARKED) == "··", "spaces alone have a sign"
    told, first = browser.value(PANEL), samples[0]
    assert told == {
        "id": str(first["token_ids"][7]),
        "policy's log-prob": _said(first["logprobs"][7]),
        "engine's log-prob": _said(first["rollout_logprobs"][7]),
        "gap": "+5.0000001",
        "entropy": _said(first["entropies"][7]),
        "advantage": _said(first["advantages"][7]),
        "weight": "1",
        "loss": "trained",
    }
    browser.press("ArrowLeft")
    assert browser.value(MARKED) == "⇥\t\\u202e\\u200b", "nothing turns the page's text round"
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    assert browser.value(PANEL)["id"] == "8" and browser.value(MARKED) == HOSTILE
    box = "document.querySelectorAll('.completion .tokens span')[41].getBoundingClientRect()"
    browser.value(f"scrollBy(0, {box}.y - 300)")
    place = browser.value(f"[{box}.x + 3, {box}.y + 5]")
    browser.drag(place, place)
    assert browser.value(PANEL)["loss"] == "left out: masked, cut at the length limit"
    for by, key in (("entropies", "entropies"), ("advantages", "advantages")):
        browser.value(f"{CHOOSE}('Color by', '{by}')")
        largest = max(abs(value) for sample in samples for value in sample[key])
        assert browser.value(chips)[0].split()[0].lstrip("+-") == _said(largest)
    browser.value(f"{CHOOSE}('Color by', 'left_out')")
    assert "6 of the shown tokens left out" in browser.value("document.body.innerText")
    browser.value(f"{CHOOSE}('Step', 1)")
    browser.value(f"{CHOOSE}('Color by', 'gaps')")
    assert "after 3 updates of this batch" in browser.value("document.body.innerText")
    assert browser.value("document.querySelectorAll('.tokens img').length") == 0
    assert browser.messages == []


def _said(number: float) -> str:
    """As JavaScript writes it."""
    return repr(number).removesuffix(".0")


def test_colors_follow_sign_and_size(browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs([make_run(tmp_path / "run", 2)])))
    browser.open(page, 1280)

    def parts(scale: str, values: list[float]) -> tuple[list[list[int]], list[str]]:
        painted, labels = browser.value(
            f"(({{paint, legend}}) => [{values}.map(paint), legend.map(ramp => ramp.label)])"
            f"(paletteOf('{scale}', {values}))"
        )
        return [list(map(int, re.findall("[0-9]+", color))) for color in painted], labels

    (deep, pale, zero, low, high), labels = parts("signed", [-2.0, -1.0, 0.0, 1.05, 1.15])
    assert zero == [255] * 3 and deep[0] > deep[2] and high[2] > high[0]
    assert sum(deep) < sum(pale) < 765 and sum(high) + 128 < sum(low) < 765
    assert labels == ["-2.00 to -1.00", "0", "+1.05 to +1.15"]
    (one, other), _ = parts("signed", [1.0, 1.0001])
    assert one == pytest.approx(other, abs=3), "nearly equal values look the same"
    (less, more), labels = parts("deviation", [-1e-6, 2e-6])
    assert less[0] > less[2] and more[2] > more[0] and sum(more) < sum(less)
    assert labels == ["-0.000001", "+0.000002"]
    assert parts("choice", [0, 1])[1] == ["no", "yes"]
    assert parts("amount", [0.0, 3.0])[1] == ["0 to 3.00"]


def test_two_steps_of_a_prompt_stand_beside_each_other_and_older_files_are_drawn(browser, tmp_path):
    folder = make_run(tmp_path / "run", 40)
    page = tmp_path / "report.html"
    page.write_text(write_page(read_runs([folder])))
    browser.open(page, 1280)
    browser.value(
        "{const box = document.querySelector('[aria-label=Step]');"
        f"{CHOOSE}('Step', [...box.options].findLast(o => o.text === '40, held-out').value)}}"
    )
    others = (
        "[...document.querySelectorAll('[aria-label=\"Beside step\"] option')].map(o => o.text)"
    )
    assert browser.value(others) == ["none", "10, held-out", "20, held-out", "30, held-out"]
    assert "an evaluation makes no forward pass" in browser.value("document.body.innerText")
    browser.value(f"{CHOOSE}('Color by', 'surprises')")
    browser.value(
        "{const box = document.querySelector('[aria-label=\"Beside step\"]');"
        f"{CHOOSE}('Beside step', box.options[1].value)}}"
    )
    columns = """[...document.querySelectorAll(".column")].map(column =>
        [column.querySelector("h3").textContent, column.getBoundingClientRect().x, column.getBoundingClientRect().y])"""
    (before, left, top), (after, right, other_top) = browser.value(columns)
    assert (before, after) == ("step 10, held-out", "step 40, held-out")
    assert top == other_top and left < right
    legends = "[...document.querySelectorAll('.column .legend')].map(legend => legend.innerText)"
    assert len(set(browser.value(legends))) == 1, "one scale for both"
    browser.resize(390)
    (_, left, top), (_, right, other_top) = browser.value(columns)
    assert left == right and top < other_top
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")

    (folder / "eval_samples.jsonl").unlink()
    path, new = folder / "samples.jsonl", ("rollout_logprobs", "loss_mask", "token_weights")
    older = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(
        "".join(
            json.dumps({key: value for key, value in sample.items() if key not in new}) + "\n"
            for sample in older
        )
    )
    page.write_text(write_page(read_runs([folder])))
    browser.open(page, 1280)
    assert browser.value("document.querySelector('[aria-label=\"Color by\"]').value") == "entropies"
    for by, why in (
        ("gaps", "samples.jsonl has no log-probs of the engine"),
        ("left_out", "no mask"),
    ):
        browser.value(f"{CHOOSE}('Color by', '{by}')")
        assert why in browser.value("document.querySelector('.column').innerText")
    browser.value("document.querySelector('.tokens span').click()")
    assert browser.value(PANEL)["engine's log-prob"] == "–" != browser.value(PANEL)["entropy"]
    assert browser.messages == []


def test_a_run_that_goes_on_and_older_runs(browser, tmp_path, capsys):
    """A torn line at the end of every file; runs without events, or without anything but a first
    line."""
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
    for sentence in (
        "old: The folder holds no events.jsonl",
        "old: The folder holds no samples.jsonl: no completions",
        "new: metrics.jsonl is still empty",
    ):
        assert sentence in shown and sentence in told
    assert "end not known" in browser.value("document.querySelector('.runs').innerText")
    prompts = browser.value("document.querySelector('#prompts').innerText")
    assert "the ledger holds" in prompts and "trained 60, filtered 20" in prompts
    assert browser.value("document.querySelectorAll('path.smooth').length") == 0, (
        "--smooth 1 draws the values"
    )
    assert browser.messages == []


# ---- without a browser


def test_headline_numbers_are_means_of_several_steps(tmp_path):
    """Of a noisy run the first and the last steps, not the first and the last; a held-out accuracy
    has its error."""
    folder = make_run(tmp_path / "run", 40)
    (run,) = read_runs([folder])
    numbers = {n["name"]: n for n in page_data([run], None, now=lambda: 0.0)["runs"][0]["numbers"]}
    rewards = [record["reward/mean"] for record in run.steps]
    assert numbers["reward/mean"]["of"] == 3
    assert numbers["reward/mean"]["first"] == pytest.approx(np.mean(rewards[:3]), rel=1e-4)
    assert numbers["reward/mean"]["last"] == pytest.approx(np.mean(rewards[-3:]), rel=1e-4)
    assert (
        numbers["eval/accuracy"]["last"] == pytest.approx(0.8)
        and numbers["eval/accuracy"]["stderr"] == 0.01
    )
    (short,) = read_runs([make_run(tmp_path / "short", 3)])
    assert {n["of"] for n in page_data([short], None, now=lambda: 0.0)["runs"][0]["numbers"]} == {1}


def test_a_folder_that_is_none_of_a_run_is_refused(tmp_path, capsys):
    make_run(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "run"), str(tmp_path / "empty"), str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err
    assert (
        "empty is not the folder of a run: it holds no metrics.jsonl" in told
        and "there is no such folder" in told
    )
    assert not (tmp_path / "run/report.html").exists()
    (tmp_path / "run/metrics.jsonl").write_text("{}\nbroken\n")
    assert main([str(tmp_path / "run")]) == 2
    assert "metrics.jsonl, line 1: needs step, has no keys" in capsys.readouterr().err


def test_what_became_of_the_prompts_is_that_of_the_command(tmp_path):
    folder = make_run(tmp_path / "run", 4)
    ledger = folder / "ledger.jsonl"

    def shown() -> tuple[list[str], list[str]]:
        (run,) = read_runs([folder])
        return page_data([run], None, now=lambda: 0.0)["ledgers"][0], run.missing

    lines, missing = shown()
    assert lines == Audit(ledger).lines and lines[0] == "the ledger holds" and not missing
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines).replace('"filtered"', '"forgotten"', 1))
    assert shown()[0][-2:] == [
        "the run ended after step 4: the prompts are used up",
        "prompt 1 is lost at step 1: neither trained, nor given up, nor waiting",
    ]
    ledger.write_text("".join(lines[:2] + lines[3:]))
    said, missing = shown()
    assert (
        said == []
        and "ledger.jsonl, line 3: step 3 follows step 1; lines are missing or there twice"
        in missing[0]
    )
    ledger.unlink()
    assert shown() == ([], []), "a supervised run, or one of an earlier release"


def test_a_broken_file_beside_the_metrics_is_said_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / "run", 5)
    (folder / "events.jsonl").write_text(
        '{"event": "start"}\n{"event": "end", "step": 5, "time": 1.0}\n'
    )
    (folder / "samples.jsonl").write_text("[]\n")
    (run,) = read_runs([folder])
    assert (
        [event["event"] for event in run.events] == ["end"]
        and run.state == "finished"
        and run.samples == []
    )
    left_out = (
        "events.jsonl has lines that cannot be used and are left out: 1, first line 1: needs step, "
        "time"
    )
    assert any(left_out in sentence for sentence in run.missing)
    assert any(
        "samples.jsonl, line 1: must be a JSON object, got a list" in sentence
        for sentence in run.missing
    )


@pytest.mark.parametrize(
    ("file", "changes", "complaint"),
    [
        ("metrics.jsonl", {"reward/mean": "high"}, "reward/mean must be a number, got 'high'"),
        ("metrics.jsonl", {"time": "now"}, "time must be a finite number, got 'now'"),
        (
            "metrics.jsonl",
            {"nonfinite": {"reward/mean": [1]}},
            "nonfinite must be a map, each value nan, inf or -inf",
        ),
        ("metrics.jsonl", {"nonfinite": {"step": "nan"}}, "step must be an integer, got nan"),
        (
            "metrics.jsonl",
            {"time/step": 10**400},
            "not JSON that can be read: an integer of 401 digits",
        ),
        ("events.jsonl", {"event": []}, "event must be a text"),
        ("events.jsonl", {"event": "start", "options": [1]}, "options must be a map, got [1]"),
        (
            "events.jsonl",
            {"event": "start", "set": 3},
            "set must be a list, each entry a text, got 3",
        ),
        (
            "events.jsonl",
            {"event": "evaluation", "accuracy": "all"},
            "accuracy must be a finite number",
        ),
        ("events.jsonl", {"event": "groups_late", "count": "x"}, "count must be an integer"),
        ("samples.jsonl", {"tokens": [1]}, "tokens must be a list, each entry a text"),
        (
            "samples.jsonl",
            {"entropies": ["x"]},
            "entropies must be a list, each entry a finite number, or null",
        ),
        ("samples.jsonl", {"reward": [1]}, "reward must be a finite number"),
        (
            "samples.jsonl",
            {"environment": [0.5]},
            "environment must be a list, each entry an integer",
        ),
    ],
)
def test_values_of_a_wrong_type_are_named_with_their_line(
    tmp_path, capsys, file, changes, complaint
):
    """Of the metrics they are refused; of what stands beside them they are left out, which is
    said."""
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


def test_of_a_long_completion_the_page_has_both_ends_and_the_worst_tokens(tmp_path):
    folder = make_run(tmp_path / "run", 1)
    sample = json.loads((folder / "samples.jsonl").read_text().splitlines()[0])
    numbers = {key: values * 100 for key, values in sample.items() if isinstance(values, list)}
    numbers["rollout_logprobs"] = [*numbers["logprobs"]]
    numbers["rollout_logprobs"][2222] += 3
    numbers["entropies"][3333] = None
    (folder / "samples.jsonl").write_text(json.dumps(sample | numbers) + "\n")
    data = page_data(read_runs([folder]), None, lambda: 0.0)
    ((entry,), (group,)) = data["samples"][0]["steps"], data["samples"][0]["steps"][0]["groups"]
    (shown,) = group["completions"]
    places = shown["places"]
    assert not entry["held_out"] and shown["length"] == 4500 and len(places) == 600
    assert {0, 299, 2217, 2222, 2227, 3333, 4440, 4499} <= set(places)
    assert places == sorted(places) and 2216 not in places
    assert shown["rollout_logprobs"][places.index(2222)] - numbers["logprobs"][2222] == 3
    assert shown["token_ids"] == [numbers["token_ids"][place] for place in places]


def test_thinned_curves_keep_every_extreme_and_gap():
    values = list(np.sin(np.arange(5000) / 7))
    values[3210], values[17] = 55.0, -44.0
    values[1000:1100] = [math.nan] * 100
    points = thinned(range(5000), values)
    assert len(points) <= 2 * BUCKETS + 2 and (points[0][0], points[-1][0]) == (0, 4999)
    assert [3210, 55] in points and [17, -44] in points
    assert [x for x, _ in points] == sorted({x for x, _ in points})
    assert any(y is None and 1000 <= x < 1100 for x, y in points)
    assert thinned(range(3), [1.0, math.nan, 2.0]) == [[0, 1], [1, None], [2, 2]], (
        "a short curve stays as it is"
    )


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
    assert (
        kept["steps"][0]["step"] == 1 and kept["steps"][-1]["step"] == 400 and kept["left_out"] >= 0
    )

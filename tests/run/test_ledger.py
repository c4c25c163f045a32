"""The check of a ledger, line by line; tests/driver/test_ledger.py has drivers that write one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from openrlhf_ext.inputs import InputError
from openrlhf_ext.run.ledger import (
    LEDGER,
    TIME_IS_UP,
    USED_UP,
    Audit,
    Repeats,
    digest,
    hash_of,
    open_ledger,
)

DATA = [digest(f"text {number}", None) for number in range(4)]
START = {
    "prompts": 4,
    "episodes": 1,
    "skipped_overlong": 2,
    "episode": hash_of(DATA),
    "drawn": 0,
    "waiting": [],
}


def entries(*numbers: int) -> list[list]:
    return [[number, DATA[number % 4]] for number in numbers]


def good() -> list[dict[str, Any]]:
    """Two steps, killed and resumed after the first, and an end."""
    return [
        {"step": 0, **START},
        {"step": 1, "trained": entries(1, 0), "drawn": 3, "waiting": [2]},
        {"step": 1, **START, "drawn": 4, "waiting": [2, 3]},
        {"step": 2, "trained": entries(3), "drawn": 4, "waiting": [2]},
        {
            "end": 2,
            "why": USED_UP,
            "filtered": entries(2),
            "in_flight": [],
            "drawn": 4,
            "waiting": [],
        },
    ]


def audited(folder: Path, lines: list[dict[str, Any]]) -> Audit:
    path = folder / "ledger.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return Audit(path)


def test_a_run_that_was_resumed_and_ended_in_order_holds(tmp_path: Path) -> None:
    audit = audited(tmp_path, good())
    assert (audit.faults, audit.proved, audit.end) == ([], 1, USED_UP)
    assert audit.counts == {"trained": 3, "filtered": 1}
    assert audit.lines[0] == "the ledger holds" and "2 too long, never drawn" in audit.lines[1]
    assert audit.lines[-1] == f"the run ended after step 2: {USED_UP}"


def test_a_run_that_was_killed_has_prompts_that_are_not_yet_accounted_for(tmp_path: Path) -> None:
    audit = audited(tmp_path, good()[:4])
    assert (audit.faults, audit.end, audit.waiting) == ([], None, {2})
    assert "did not end in order; not yet accounted for: 1 prompts, numbers 2" in audit.lines[-1]
    with (tmp_path / "ledger.jsonl").open("a") as file:
        file.write('{"end": 2, "wh')  # it is being written
    assert Audit(tmp_path / "ledger.jsonl").faults == []


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (
            3,
            {"trained": []},
            "prompt 3 is lost at step 2: neither trained, nor given up, nor waiting",
        ),
        (4, {"filtered": []}, "prompt 2 is lost at step 2"),
        (
            3,
            {"trained": entries(3, 1)},
            "prompt 1 is trained at step 2, and was before trained at step 1",
        ),
        (
            3,
            {"trained": entries(3, 3)},
            "prompt 3 is trained at step 2, and was before trained at step 2",
        ),
        (4, {"late": entries(3)}, "prompt 3 is late at step 2, and was before trained at step 2"),
        (
            3,
            {"trained": [*entries(3), [9, DATA[0]]]},
            "prompt 9 is trained at step 2, and was before not drawn",
        ),
        (3, {"waiting": [2, 0]}, "prompt 0 waits at step 2, 1 times, and is trained at step 1"),
        (2, {"waiting": [3]}, "prompt 2 is lost resuming from step 1"),
        (2, {"episode": hash_of(DATA[:3])}, "the run went on from step 1 with other data"),
        (
            3,
            {"trained": [[3, DATA[0]]]},
            "prompts 0 to 3 are not those of the data, each once: the loader went on at "
            "another place, resumed from step 1; twice there: 0, 3",
        ),
        (2, {"episodes": 2}, "the prompts were used up after 4, and 8 were due"),
        (4, {"filtered": [], "waiting": [2]}, "the run has ended, and prompts still wait: 2"),
    ],
)
def test_what_is_wrong_is_named_with_number_and_step(
    tmp_path: Path, number: int, change: dict, said: str
) -> None:
    lines = good()
    lines[number] |= change
    audit = audited(tmp_path, lines)
    assert said in "\n".join(audit.faults)
    assert audit.lines[0].startswith(
        f"the ledger does not hold, {len(audit.faults)} faults: look at events.jsonl"
    )


@pytest.mark.parametrize(
    ("number", "line", "said"),
    [
        (0, {}, "line 1: needs drawn, waiting"),
        (0, good()[1], "line 1: step 1 follows step 0"),
        (2, {"step": 0, **START}, "line 3: a start at step 0 follows step 1"),
        (
            2,
            {**good()[2], "step": 2},
            "line 3: a start at step 2 follows step 1; lines are missing",
        ),
        (
            1,
            good()[4] | {"end": 0, "filtered": []},
            "line 3: a start at step 1 follows step 0; lines are missing",
        ),
        (3, {"end": 2, "drawn": 4, "waiting": [2, 3]}, "line 4: step 2 follows step 1"),
        (
            3,
            {"end": 1, "drawn": 4, "waiting": [2, 3]},
            "line 4: an end, and no other line, says why",
        ),
        (
            3,
            {"end": 1, "why": "x", "drawn": 4, "waiting": [2, 3]},
            "line 4: why must be the prompts are used up or",
        ),
        (
            3,
            {"end": 1, "why": USED_UP, "drawn": 4, "waiting": [2, 3]},
            "line 5: step 2 follows step 1",
        ),
        (
            3,
            {**good()[3], "step": 4},
            "line 4: step 4 follows step 1; lines are missing or there twice",
        ),
        (
            3,
            {**good()[3], "step": 1},
            "line 4: step 1 follows step 1; lines are missing or there twice",
        ),
        (
            3,
            {**good()[3], "trained": [[3, "not a digest"]]},
            "line 4: trained must be a list, each entry",
        ),
        (3, {**good()[3], "drawn": 2**60}, "prompts cannot be drawn, after 4 before"),
        (3, {**good()[3], "drawn": 3}, "3 prompts cannot be drawn, after 4 before"),
        (0, {"step": 0, **START, "prompts": 0}, "prompts must be a number from 1 on"),
    ],
)
def test_a_damaged_ledger_is_refused_with_its_line(
    tmp_path: Path, number: int, line: dict, said: str
) -> None:
    lines = good()
    lines[number] = line
    with pytest.raises(InputError) as raised:
        audited(tmp_path, lines)
    assert said in str(raised.value)


def test_a_ledger_that_ends_before_the_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert audited(tmp_path, good()[:2]).faults == []
    with pytest.raises(
        InputError, match="ends with step 0, metrics.jsonl with 2; lines are missing"
    ):
        audited(tmp_path, good()[:1])


OPTIONS = {
    "rollout.batch_size": 2,
    "algo.dynamic_filtering_enable": False,
    "train.late_groups": "train",
    "train.agent_func_path": None,
    "train.rollback_on": None,
    "train.max_minutes": None,
}


def whole(folder: Path, options: dict[str, Any], *last: str) -> list[dict[str, Any]]:
    """A ledger of three steps, with ``options`` since the second start, and the run's events."""
    events = [
        {"event": "start", "options": OPTIONS},
        {"event": "ready"},
        {"event": "failure"},
        {"event": "start", "options": options},
        {"event": "resumed", "resume_step": 1},
        {"event": "ready"},
        *({"event": event, "options": options} for event in last),
    ]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    start = {**START, "prompts": 5, "episode": hash_of([*DATA, DATA[0]])}
    return [
        {"step": 0, **start},
        {"step": 1, "trained": entries(1, 0), "drawn": 3, "waiting": [2]},
        {"step": 1, **start, "drawn": 4, "waiting": [2, 3]},
        {"step": 2, "trained": entries(3, 2), "drawn": 4, "waiting": []},
        {"step": 3, "trained": entries(4), "drawn": 5, "waiting": []},
        {"end": 3, "why": USED_UP, "in_flight": [], "queued": [], "drawn": 5, "waiting": []},
    ]


def test_a_ledger_holds_beside_the_events_of_its_run(tmp_path: Path) -> None:
    assert audited(tmp_path, whole(tmp_path, OPTIONS, "end")).faults == []
    lines = whole(
        tmp_path, {**OPTIONS, "train.max_minutes": 1, "algo.dynamic_filtering_enable": True}, "end"
    )
    lines[3] |= {"trained": entries(3, 4), "filtered": entries(2), "drawn": 5}
    lines[4:] = [
        {"end": 2, "why": TIME_IS_UP, "in_flight": [], "queued": [], "drawn": 5, "waiting": []}
    ]
    assert audited(tmp_path, lines).faults == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {3: {"trained": entries(3), "filtered": entries(2)}},
            "filtered ended 1 prompts, or the run, and algo.dynamic",
        ),
        (
            {4: {"trained": [], "late": entries(4)}},
            "late ended 1 prompts, or the run, and train.late_gro",
        ),
        (
            {4: {"trained": [], "unstarted": entries(4)}},
            "unstarted ended 1 prompts, or the run, and train.ag",
        ),
        (
            {4: {"trained": [], "skipped": entries(4)}},
            "skipped ended 1 prompts, or the run, and train.roll",
        ),
        (
            {4: {"trained": [], "waiting": [4]}, 5: {"queued": entries(4)}},
            "queued ended 1 prompts, or the run, and train",
        ),
        (
            {4: {"trained": [], "in_flight": entries(4)}},
            "in_flight ended 1 prompts, or the run, and train.max",
        ),
        (
            {5: {"why": TIME_IS_UP}},
            "train.max_minutes ended 0 prompts, or the run, and train.max_minutes does",
        ),
        (
            {3: {"trained": entries(3), "waiting": [2]}, 4: {"trained": entries(4, 2)}},
            "step 2 trained 1 prompts, rollout",
        ),
        (
            {
                1: {"trained": entries(1, 0, 2), "waiting": []},
                2: {"waiting": [3]},
                3: {"trained": entries(3)},
            },
            "step 1 trained 3 prompts, rollout.batch_size is [2]",
        ),
    ],
)
def test_what_the_runs_options_do_not_allow_is_named(
    tmp_path: Path, changes: dict[int, dict], said: str
) -> None:
    lines = whole(tmp_path, OPTIONS, "end")
    for number, change in changes.items():
        lines[number] |= change
    assert said in "\n".join(audited(tmp_path, lines).faults)


def test_an_end_that_the_ledger_lacks_is_missing(tmp_path: Path) -> None:
    for count in (4, 5):
        with pytest.raises(
            InputError, match="has no end, and events.jsonl has one; lines are missing"
        ):
            audited(tmp_path, whole(tmp_path, OPTIONS, "end")[:count])
        assert audited(tmp_path, whole(tmp_path, OPTIONS, "end", "start")[:count]).faults == []


def test_an_empty_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no line yet"):
        audited(tmp_path, [])


def test_steps_that_an_earlier_release_made_are_said_and_not_judged(tmp_path: Path) -> None:
    lines = good()
    audit = audited(tmp_path, lines[2:])
    assert (audit.faults, audit.since, audit.proved) == ([], 1, 0)
    assert (
        "from step 1 on: another run folder or an earlier release has the steps before"
        in audit.lines
    )
    assert audit.lines[0] == "the ledger holds from step 1 on"


def test_a_run_that_goes_on_moves_what_it_repeats_and_the_end_aside(tmp_path: Path) -> None:
    audited(tmp_path, good())
    open_ledger(tmp_path / "ledger.jsonl", 1).close()
    kept = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert kept == good()[:3]
    open_ledger(tmp_path / "ledger.jsonl", 0).close()
    assert (tmp_path / "ledger.jsonl").read_text() == "" and (
        tmp_path / "ledger.jsonl.superseded.2"
    ).exists()


def test_a_digest_is_that_of_the_label_that_a_checkpoint_has_kept() -> None:
    for label in (None, "7", 7, 0.1, ["a", ("b", 1)], {"answer": {"1": (2,)}}):
        assert digest("text", json.loads(json.dumps(label))) == digest("text", label)
    assert len({digest("a", "b"), digest("a", "c"), digest("b", "b"), digest("a", None)}) == 4
    assert hash_of([*DATA]) == hash_of(DATA[::-1]) != hash_of([*DATA[:3], DATA[0]])


def test_what_an_episode_has_trained_before_is_counted(tmp_path):
    path = tmp_path / LEDGER
    lines = [{"step": 1, "trained": [[0, "a"], [1, "b"]]}, {"step": 2, "trained": [[2, "b"]]}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    repeats = Repeats(["a", "b", "b"], path)
    assert repeats.add([(3, "b"), (4, "a"), (5, "b")]) == 0, (
        "the next episode; the data have b twice"
    )
    assert Repeats(["a", "b", "b"], path).add([(2, "a")]) == 1, "a loader that began anew"
    assert repeats.add([(3, "b"), (4, "a")]) == 2

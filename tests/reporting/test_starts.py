"""Which options trained which steps."""

from __future__ import annotations

from openrlhf_ext.reporting.starts import starts_of


def start(step: int, **options: object) -> dict:
    return {
        "event": "start",
        "resume_step": step,
        "options": {"ckpt.load_enable": step > 0, **options},
    }


def test_a_run_that_goes_on_with_other_options_has_two_starts():
    found = starts_of([start(0, lr=1), {"event": "ready"}, start(8, lr=2), start(12, lr=2)])
    assert [(each.steps, each.options["lr"]) for each in found] == [
        ("steps 1 to 8", 1),
        ("from step 9", 2),
    ]


def test_steps_that_were_made_again_are_of_the_later_start():
    found = starts_of([start(0, lr=1), start(4, lr=2), start(4, lr=3), start(0, lr=4)])
    assert [(each.steps, each.options["lr"]) for each in found] == [("from step 1", 4)]
    older = [start(0, lr=1), start(8, lr=2), {"event": "resumed", "resume_step": 6}]
    assert [each.steps for each in starts_of(older)] == ["steps 1 to 6", "from step 7"]
    restarted = [start(0, lr=1), {"event": "restart"}, {"event": "resumed", "resume_step": 6}]
    assert [each.steps for each in starts_of(restarted)] == ["from step 1"], "by the same command"
    assert starts_of([]) == []

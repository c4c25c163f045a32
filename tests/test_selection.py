"""What ``bash tests/run.sh`` leaves out has passed on the same code."""

from __future__ import annotations

import json

import pytest

from tests import selection

TREE = {
    "tests/conftest.py": "",
    "tests/test_job.py": "COMMAND = ['python', '-m', 'openrlhf_ext.job']\nDATA = 'configs/job.yaml'\n",
    "tests/test_loss.py": "from openrlhf_ext.methods import losses\n",
    "tests/helper.py": "",
    "configs/job.yaml": "steps: 1\n",
    "openrlhf_ext/__init__.py": "",
    "openrlhf_ext/job.py": "def main():\n    from openrlhf_ext import engine\n",
    "openrlhf_ext/engine.py": "'Samples.'\n",
    "openrlhf_ext/methods/__init__.py": "from importlib import import_module\n",
    "openrlhf_ext/methods/losses.py": "",
    "openrlhf_ext/methods/grpo.py": "",
    "requirements/base.lock": "torch\n",
}
JOB, LOSS = "tests/test_job.py", "tests/test_loss.py::test_sum"


@pytest.fixture(autouse=True)
def tree(tmp_path, monkeypatch):
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    monkeypatch.setattr(selection, "ROOT", tmp_path)
    monkeypatch.setattr(selection, "PASSED", tmp_path / "tests/passed.json")
    monkeypatch.setattr(selection, "CHOSEN", (JOB, LOSS))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for function in vars(selection).values():
        if hasattr(function, "cache_clear"):
            function.cache_clear()


def write_record() -> None:
    selection.PASSED.write_text(json.dumps({test: selection.digest(test) for test in (JOB, LOSS)}))


@pytest.mark.parametrize(
    ("changed", "run"),
    [
        ("openrlhf_ext/engine.py", {JOB}),  # by a module that the job imports inside a function
        ("configs/job.yaml", {JOB}),
        ("openrlhf_ext/methods/grpo.py", {LOSS}),  # a folder whose modules are imported by name
        ("tests/helper.py", {JOB, LOSS}),
        ("requirements/base.lock", {JOB, LOSS}),
        ("tests/test_loss.py", {LOSS}),
        (None, set()),
    ],
)
def test_a_test_runs_again_when_a_file_that_it_reaches_has_changed(tree, changed, run):
    write_record()
    if changed:
        (tree / changed).write_text((tree / changed).read_text() + "changed = 1\n")
    forget()
    assert {JOB, LOSS} - set(selection.left_out()) == run


def test_documentation_comments_and_layout_change_nothing(tree):
    write_record()
    (tree / "openrlhf_ext/engine.py").write_text('"""Samples."""\n\n# as asked\n')
    forget()
    assert selection.left_out() == [JOB, LOSS]


def test_a_test_that_never_passed_runs(tree):
    selection.PASSED.write_text("{}")
    assert selection.left_out() == []


def test_a_name_without_a_test_is_an_error(tree, monkeypatch):
    selection.PASSED.write_text("{}")
    monkeypatch.setattr(selection, "CHOSEN", ("tests/test_gone.py",))
    with pytest.raises(FileNotFoundError, match="tests/test_gone.py, which does not exist"):
        selection.left_out()


def test_whole_jobs_reach_the_trainer_and_tests_of_engines_do_not(monkeypatch):
    """Of this checkout: what a change of the training loop and of the engine runs again."""
    monkeypatch.undo()
    forget()
    loop, engine = (
        selection.ROOT / f"openrlhf_ext/{name}.py" for name in ("driver/loop", "rollout/engine")
    )
    job, mixture = "tests/e2e/test_walkthrough.py", "tests/rollout/test_mixture.py"
    assert {loop, engine} <= selection.reached(job)
    assert engine in selection.reached(mixture) and loop not in selection.reached(mixture)

"""An option is declared once, by its field: help, files, words, report, documentation and the loss
know it then."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import ray
import torch

from benchmarks.option_tables import format_markdown
from openrlhf_ext.algorithms import registry
from openrlhf_ext.config import ConfigError, format_config, load, load_config, run_config
from openrlhf_ext.config.run_config import RunConfig
from openrlhf_ext.config.upstream import upstream_args
from openrlhf_ext.driver import preflight
from openrlhf_ext.driver.settings import build_algorithm
from openrlhf_ext.options import added
from openrlhf_ext.options.sections import Train
from tests.algorithms.helpers import random_groups, to_batch

METHOD = """
from openrlhf_ext.algorithms import option, register_algorithm
from openrlhf_ext.algorithms.methods.dapo import Dapo, DapoOptions

class LoudOptions(DapoOptions):
    loudness: float = option(2.0, "factor of every advantage", gt=0, le=10)

@register_algorithm("loud_dapo", LoudOptions)
class Loud(Dapo):
    def advantages(self, inputs):
        fields = super().advantages(inputs)
        return fields | {"advantages": self.options.loudness * fields["advantages"]}
"""


def refused(words: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(words, more_rules=preflight.findings)
    return [violation.message for violation in caught.value.violations]


def test_an_option_of_a_users_own_method(run_dir: Path, capsys, monkeypatch):
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    # the model of run_dir has no tensors
    monkeypatch.setattr(preflight, "checkpoint_violations", lambda config: [])
    (run_dir / "loud.py").write_text(METHOD)
    own = ["--algo.advantage.estimator", "custom", "--algo.module_path", "loud.py"]
    with pytest.raises(SystemExit):
        load_config([*own, "--help", "algo.custom"])
    shown = capsys.readouterr().out
    assert (
        "--algo.custom.loudness  <number > 0 and <= 10>\n       factor of every advantage [2]"
        in shown
    )

    (run_dir / "loud.yaml").write_text("algo:\n  custom:\n    loudness: 11\n")
    words = ["--config", "run.yaml", *own]
    assert refused([*words, "--config", "loud.yaml"]) == [
        "algo.custom.loudness: expected number > 0 and <= 10, got 11 (loud.yaml:3)"
    ]
    (unknown,) = refused([*words, "--algo.custom.loudnes", "3"])
    assert unknown.startswith("algo.custom: unknown option 'loudnes'; did you mean 'loudness'?")

    config = load_config([*words, "--algo.custom.loudness", "3"], more_rules=preflight.findings)
    assert config.warnings == () and "loudness: 3  # set: command line" in format_config(config)
    batch, new, _ = to_batch(random_groups(0))
    loud, dapo = build_algorithm(config), registry.get_algorithm("dapo")
    losses = [algorithm.loss(new, algorithm.shape(batch)).value for algorithm in (loud, dapo)]
    assert torch.allclose(losses[0], 3 * losses[1]) and losses[1] != 0
    sent = ray.cloudpickle.dumps(loud)  # to ranks that cannot import the file
    del sys.modules[type(loud).__module__]
    assert ray.cloudpickle.loads(sent).options.loudness == 3


def test_an_option_of_a_section(run_dir: Path, monkeypatch, capsys):
    class Patient(Train):
        patience: int = added(5, "steps without a gain after which a run stops", ge=1)

    class Config(RunConfig):
        train: Patient = Patient()

    for module in (run_config, load):
        monkeypatch.setattr(module, "RunConfig", Config)
    with pytest.raises(SystemExit):
        load_config(["--help", "train"])
    assert (
        " + --train.patience  <integer >= 1>\n       steps without a gain"
        in capsys.readouterr().out
    )
    assert "| `train.patience`+ | integer >= 1 (`5`) | steps without a gain" in format_markdown()
    (run_dir / "more.yaml").write_text("train:\n  patience: 0\n")
    words = ["--config", "run.yaml", "--config", "more.yaml"]
    assert refused(words)[0] == "train.patience: expected integer >= 1, got 0 (more.yaml:2)"
    assert refused([*words[:2], "--train.patence", "3"])[0].endswith("did you mean train.patience?")
    config = load_config([*words, "--train.patience", "7"])
    assert (
        config.train.patience == 7
        and "patience: 7  # set: command line (default: 5)" in format_config(config)
    )
    assert not hasattr(upstream_args(config).train, "patience"), "OpenRLHF does not know it"
    with pytest.raises(Exception, match="frozen"):
        config.train.patience = 8

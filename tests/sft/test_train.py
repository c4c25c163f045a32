"""Supervised runs through their command: transformers' loss and steps, in every layout; resumed,
the same bits."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrlhf_ext.cli import train_sft
from openrlhf_ext.cli.report import main as report
from openrlhf_ext.locks import FolderLock
from openrlhf_ext.run.ending import listened
from openrlhf_ext.tools.merge import merge
from tests.config.conftest import load_supervised
from tests.e2e.jobs import FORKED, behind
from tests.launch import launch
from tests.models import make_tiny_policy
from tests.patience import PATIENCE_S, until

pytest.importorskip("openrlhf", reason="examples are read by OpenRLHF's class")
pytestmark = pytest.mark.slow

BATCH, EPOCHS, LR, EPS = 5, 2, 2e-3, 1e-4
QUESTIONS = [(f"{a}+{b}=", f"{a + b}" + "!" * a) for a in range(1, 5) for b in (1, 7, 10)]


class Task:
    """A model and its examples in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.model = folder, folder / "model"
        make_tiny_policy(self.model, num_hidden_layers=4)
        for name, questions in (
            ("train", QUESTIONS),
            ("held_out", [("9+9=", "18"), ("1+0=", "1")]),
        ):
            lines = (
                json.dumps({"q": question, "a": answer + "<|im_end|>"}) + "\n"
                for question, answer in questions
            )
            (folder / f"{name}.jsonl").write_text("".join(lines))

    def words(self, name: str, **more: object) -> list[str]:
        given = {
            "model.model_name_or_path": self.model,
            "data.dataset": self.folder / "train.jsonl",
            "data.input_key": "q",
            "data.output_key": "a",
            "data.input_template": "null",
            "data.max_len": 64,
            "eval.dataset": self.folder / "held_out.jsonl",
            "megatron.param_dtype": "fp32",
            "train.batch_size": BATCH,
            "train.micro_batch_size": 2,
            "train.max_epochs": EPOCHS,
            "adam.lr": LR,
            "adam.eps": EPS,
            "lr_scheduler": "constant",
            "ckpt.output_dir": self.folder / name,
            "ckpt.path": self.folder / name / "steps",
        } | {option.replace("__", "."): value for option, value in more.items()}
        return [word for option, value in given.items() for word in (f"--{option}", str(value))]

    def train(self, ranks: int, *commands: list[str]) -> str:
        """What rank 0 says."""
        found = launch("tests.sft.ranks", "train", ranks, commands=list(commands))
        assert [codes for codes, _ in found] == [[0] * len(commands)] * ranks
        return "\n".join(found[0][1])

    def metrics(self, name: str) -> list[dict]:
        return [
            json.loads(line)
            for line in (self.folder / name / "metrics.jsonl").read_text().splitlines()
        ]

    def events(self, name: str) -> list[dict]:
        return [
            json.loads(line)
            for line in (self.folder / name / "events.jsonl").read_text().splitlines()
        ]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    return Task(tmp_path_factory.mktemp("sft"))


def encoded(task: Task, questions: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    rows = [
        [tokenizer(text)["input_ids"] for text in (asked, answer + "<|im_end|>")]
        for asked, answer in questions
    ]
    longest = max(len(q) + len(a) for q, a in rows)
    ids = [q + a + [0] * (longest - len(q) - len(a)) for q, a in rows]
    labels = [[-100] * len(q) + a + [-100] * (longest - len(q) - len(a)) for q, a in rows]
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


@pytest.fixture(scope="module")
def truth(task: Task) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses of the steps, held-out losses before and after each pass, and the last weights:
    transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(task.model, dtype=torch.float32)
    decayed = [{"params": list(model.parameters()), "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(decayed, LR, (0.9, 0.95), EPS)

    def held_out() -> float:
        with torch.no_grad():
            return model(**encoded(task, [("9+9=", "18"), ("1+0=", "1")])).loss.item()

    losses, evaluations = [], [held_out()]
    for epoch in range(EPOCHS):
        order = torch.randperm(
            len(QUESTIONS), generator=torch.Generator().manual_seed(42 + epoch)
        ).tolist()
        for start in range(0, len(order), BATCH):
            batch = encoded(task, [QUESTIONS[row] for row in order[start : start + BATCH]])
            loss = model(**batch).loss  # the mean over all labels of the batch
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        evaluations.append(held_out())
    return losses, evaluations, {name: p.detach() for name, p in model.named_parameters()}


LAYOUTS = {
    1: [{}, {"train__dynamic_batch_enable": True, "train__max_tokens_per_gpu": 20}],
    4: [
        {"megatron__tensor_parallel_size": 2, "megatron__sequence_parallel_enable": True},
        {
            "megatron__pipeline_parallel_size": 2,
            "megatron__context_parallel_size": 2,
            "megatron__decoder_last_pipeline_num_layers": 1,
        },
        {"megatron__recompute": "full", "megatron__distributed_optimizer_enable": False},
    ],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_loss_steps_and_weights_are_those_of_transformers(task, truth, ranks):
    names = [f"layout{ranks}_{number}" for number in range(len(LAYOUTS[ranks]))]
    saved = task.words("moved", ckpt__save_steps=4)
    moved = (
        [saved, [*saved, "--ckpt.load_enable", "--megatron.tensor_parallel_size", "2"]]
        if ranks > 1
        else []
    )
    of_layouts = (
        task.words(name, **layout) for name, layout in zip(names, LAYOUTS[ranks], strict=True)
    )
    task.train(ranks, *of_layouts, *moved)
    for name in [*names, *(["moved"] if moved else [])]:
        compare(task, name, *truth)
    page = task.folder / f"report{ranks}.html"
    assert report([str(task.folder / names[0]), "--output", str(page)]) == 0
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text(), re.S)[1])
    assert {"loss/sft", "eval/loss", "grad_norm"} <= set(data["key"]) and data["runs"][0][
        "state"
    ] == "finished"


def compare(
    task: Task, name: str, losses: list[float], evaluations: list[float], weights: dict
) -> None:
    records = task.metrics(name)
    steps = [record for record in records if "loss/sft" in record]
    assert [record["step"] for record in steps] == list(range(1, len(losses) + 1))
    assert [record["loss/sft"] for record in steps] == pytest.approx(losses, rel=1e-5), name
    assert [record["eval/loss"] for record in records if "eval/loss" in record] == pytest.approx(
        evaluations, rel=1e-5
    )
    assert steps[0]["tokens/trained"] == _labels(task)
    assert max(record["mismatch/loss"] for record in steps) < 1e-5, (
        "the loss is that of the log-probs"
    )
    assert [record["update/adam_steps"] for record in steps] == [
        float(record["step"]) for record in steps
    ]
    assert {record["update/still"] for record in steps} == {0.0}
    assert LR / 2 < steps[0]["update/rms"] < LR * 2
    assert {(record["examples/repeated"], record["answers/ended"]) for record in steps} == {
        (0.0, 1.0)
    }
    assert {record["eval/known"] for record in records if "eval/loss" in record} == {0.0}
    written = load_file(task.folder / name / "model.safetensors")
    start = load_file(task.model / "model.safetensors")
    for key, first in start.items():
        moved = (written[key] - first).norm()
        assert moved > 1e-4 and (written[key] - weights[key]).norm() < 1e-3 * moved, (
            f"{key} of {name}"
        )
    assert AutoTokenizer.from_pretrained(task.folder / name)("1+1=")["input_ids"], (
        "transformers loads it whole"
    )


def _labels(task: Task) -> int:
    order = torch.randperm(len(QUESTIONS), generator=torch.Generator().manual_seed(42)).tolist()[
        :BATCH
    ]
    return int((encoded(task, [QUESTIONS[row] for row in order])["labels"] >= 0).sum())


def weights_of(folder: Path) -> Path:
    """What a run wrote: weights, or an adapter and nothing else."""
    (file,) = [
        path
        for name in ("model", "adapter_model")
        if (path := folder / f"{name}.safetensors").exists()
    ]
    return file


def digest(folder: Path) -> str:
    return hashlib.sha256((weights_of(folder)).read_bytes()).hexdigest()


RESUMED = {
    "bf16": (4, {"megatron__param_dtype": "bf16"}),
    "fp8": (2, {"fp8__enable": True, "fp8__emulate": True, "train__max_epochs": 1}),
    "lora": (2, {"ds__lora__rank": 4, "ds__lora__dropout": 0.1, "train__max_epochs": 1}),
}
"""Name: the step of the checkpoint, and options."""
TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[{% endif %}"
)


def test_a_resumed_run_ends_in_the_same_bits(task, monkeypatch, capsys):
    """The first from the checkpoint before the newest one, which is damaged; it began in the folder
    of another run."""
    whole = [task.words(f"{name}_whole", **more) for name, (_, more) in RESUMED.items()]
    saved = [
        task.words(f"{name}_saved", ckpt__save_steps=at, ckpt__save_hf=True, **more)
        for name, (at, more) in RESUMED.items()
    ]
    damaged = task.words(
        "damaged",
        ckpt__save_steps=2,
        logger__tensorboard_dir=task.folder / "boards",
        logger__wandb__key="a-key",
        **RESUMED["bf16"][1],
    )
    (task.folder / "damaged").mkdir()
    (task.folder / "damaged/model.safetensors").write_bytes(b"of an earlier run")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(task.folder))
    templated = {
        "data__apply_chat_template": True,
        "data__tokenizer_chat_template": TEMPLATE,
        "train__max_epochs": 1,
        "ckpt__save_steps": 2,
        "ckpt__save_hf": True,
    }
    templates = [
        task.words("templated", **templated),
        task.words("templated_lora", **templated, ds__lora__rank=2),
    ]
    templates = [
        [word for word in words if word not in ("--data.input_template", "null")]
        for words in templates
    ]
    task.train(1, *whole, *saved, damaged, *templates)
    check_templates(task)
    wanted = {name: digest(task.folder / f"{name}_whole") for name in RESUMED}
    for name, (at, _) in RESUMED.items():
        folder = task.folder / f"{name}_saved"
        assert digest(folder) == wanted[name], "saving changes nothing"
        assert sorted(path.name for path in (folder / "steps").glob("global_step*")) == [
            f"global_step{at}",
            f"global_step{at}_hf",
        ]
        weights_of(folder).unlink()
    newest = task.folder / "damaged/steps/global_step6/model/rank00000.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    assert dry_run(capsys, *damaged)[0] == 2
    for words in saved:
        status, said = dry_run(capsys, *words)
        assert status == 0 and said.startswith("would start\ngoes on from "), said
    status, said = dry_run(capsys, *saved[-1], "--data.max_samples", "5", "--ds.lora.alpha", "3")
    assert (
        status == 2
        and said.startswith("2 problems in the configuration")
        and "other examples" in said
    )
    assert re.search(r"ds.lora.alpha [\d.]+, here 3", said), said
    again = [
        *damaged,
        "--ckpt.load_enable",
        "--ckpt.fallback_enable",
        "--train.max_tokens_per_gpu",
        "99",
        "--ds.adam_offload",
    ]
    said = task.train(1, *(words + ["--ckpt.load_enable"] for words in saved), again)
    for name, like in {
        "bf16_saved": "bf16",
        "fp8_saved": "fp8",
        "lora_saved": "lora",
        "damaged": "bf16",
    }.items():
        assert digest(task.folder / name) == wanted[like]
        steps = [record["step"] for record in task.metrics(name) if "loss/sft" in record]
        assert steps == list(range(1, len(steps) + 1)), "the repeated steps are there once"
        assert {record.get("examples/repeated", 0.0) for record in task.metrics(name)} == {0.0}
    streamed = [
        record["step"]
        for record in task.metrics("damaged")
        if record.get("update/stream_seconds", 0.0) > 0
    ]
    assert streamed == [5, 6], "steps after the checkpoint had Adam's states in host memory"
    assert f"{newest} is truncated" in said and "going back to the checkpoint before it" in said
    assert "resuming with another train.max_tokens_per_gpu: 99, it was 16192" in said
    assert (
        task.folder / "damaged/superseded.1/model.safetensors"
    ).read_bytes() == b"of an earlier run"
    assert [
        event["resume_step"] for event in task.events("damaged") if event["event"] == "resumed"
    ] == [4]
    assert list(task.folder.glob("boards/*/events.out.tfevents.*"))
    assert list(task.folder.glob("wandb/offline-run-*/*.wandb"))


def check_templates(task: Task) -> None:
    """Whatever is loaded of a run renders as it was trained: weights, adapter, checkpoint,
    merged."""
    whole, lora = task.folder / "templated", task.folder / "templated_lora"
    assert merge(lora, task.folder / "merged")
    saved = [*whole.glob("steps/global_step2_hf"), *lora.glob("steps/global_step2_hf")]
    assert len(saved) == 2
    chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    for folder in (whole, lora, *saved, task.folder / "merged"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "[1+1=][2]", folder


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    capsys.readouterr()
    return train_sft.main([*words, "--ckpt.load_enable", "--dry_run"]), "".join(capsys.readouterr())


def test_a_dry_run_of_a_hub_name_cannot_say(task, capsys):
    status, said = dry_run(
        capsys, *task.words("hub", **{"model.model_name_or_path": "Someone/Unknown"})
    )
    assert status == 3 and said.startswith(
        "cannot say: model.model_name_or_path Someone/Unknown: not on this machine"
    )


def test_a_hub_name_is_downloaded_before_the_rules_are_asked(task, monkeypatch, capsys):
    """Of a model that no layout of the options fits: it would otherwise be found by the ranks."""
    monkeypatch.setattr(train_sft, "downloaded", lambda option, name: str(task.model))
    words = task.words(
        "hub",
        **{
            "model.model_name_or_path": "Someone/Unknown",
            "megatron.tensor_parallel_size": 3,
            "model.num_gpus_per_node": 3,
        },
    )
    assert train_sft.main(words) == 2
    assert "must divide the model's attention heads: got 3" in capsys.readouterr().err


def test_states_that_no_gpu_holds_are_refused_and_nothing_is_said_of_engines(task, capsys):
    assert train_sft.main(task.words("small", megatron__gpu_memory_gib=2)) == 2
    said = capsys.readouterr().err
    assert (
        "1 problem" in said
        and "training takes 3.0 GiB before any activation" in said
        and "has 2.0" in said
    )
    assert "vllm" not in said and "actor." not in said
    assert not (task.folder / "small").exists()


def test_a_folder_of_another_run_is_refused(task, capsys):
    with closing(FolderLock(task.folder / "locked", False, "")):
        assert train_sft.main(task.words("locked", **{"model.num_gpus_per_node": 2})) == 2, (
            "by the launching process"
        )
        assert train_sft.main(task.words("locked")) == 2
    said = capsys.readouterr().err
    assert (
        said.count(
            f"- ckpt.output_dir and logger.metrics_path {task.folder / 'locked'} is in use by pid"
        )
        == 2
    )


def test_a_rank_finds_the_environment_of_its_layers(task, monkeypatch):
    config = load_supervised(task.words("env", **{"train.full_determinism_enable": True}))
    monkeypatch.setattr("openrlhf_ext.sft.train.run_rank", lambda config: 0)
    for name in (
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "before")
        monkeypatch.delenv(name)
    assert train_sft.run(config) == 0
    assert os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0" and os.environ["WORLD_SIZE"] == "1"


def test_a_failure_is_an_event(task):
    argv = task.words("diverged", **{"adam.lr": 1e30, "max_norm": 0, "adam.eps": 1e-30})
    with pytest.raises(AssertionError, match="NonFiniteLogitsError"):
        task.train(1, argv)
    events = task.events("diverged")
    assert events[-1]["event"] == "failure" and "NaN or infinite" in events[-1]["error"]


def ended_by(task: Task, name: str, ranks: int, number: int) -> tuple[int, str]:
    """Status and words of a run that gets a signal after its first step, as from a terminal: all of
    its processes."""
    words = task.words(name, **{"model.num_gpus_per_node": ranks, "train.max_epochs": 4000})
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_sft", *words]
    metrics = task.folder / name / "metrics.jsonl"
    with subprocess.Popen(
        command,
        env=os.environ | FORKED,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        deadline = time.monotonic() + PATIENCE_S
        while not (metrics.exists() and "loss/sft" in metrics.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
            time.sleep(0.2)
        command = behind(psutil.Process(process.pid))
        (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
        said = process.communicate(timeout=PATIENCE_S)[1]
    until(
        lambda: (
            not any(
                str(task.folder / name) in " ".join(p.info["cmdline"] or ())
                for p in psutil.process_iter(["cmdline"])
            )
        ),
        "the end of all ranks",
    )
    return process.returncode, said


@pytest.mark.parametrize(
    ("ranks", "number", "status"),
    [
        (2, signal.SIGTERM, 143),
        (1, signal.SIGHUP, 129),
        (2, signal.SIGINT, 130),
    ],
)
def test_a_signal_ends_all_ranks_with_its_status_an_event_and_a_line_how_to_go_on(
    task, ranks, number, status
):
    name, saves = f"{number.name}{ranks}", number != signal.SIGINT
    code, said = ended_by(task, name, ranks, number)
    assert (code, "Traceback" in said) == (status, False), said
    begins = "to go on from" if saves else "no checkpoint is in"
    assert said.count(f"{number.name}: {begins} {task.folder / name / 'steps'}") == 1, said
    events = task.events(name)
    assert [event["event"] for event in events][-2:] == (["checkpoint"] if saves else ["ready"]) + [
        "interrupted"
    ]
    newest = [
        str(folder) for folder in (task.folder / name / "steps").glob("global_step*") if saves
    ]
    assert (events[-1]["signal"], events[-1]["checkpoint"]) == (
        number.name,
        newest[0] if saves else None,
    )
    assert events[0]["layout"]["data"] == ranks
    assert len([*(task.folder / name / "steps").glob("global_step*/manifest.json")]) == saves


def test_under_nohup_the_end_of_the_terminal_is_not_heard(monkeypatch):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert listened() == [signal.SIGINT, signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
    assert listened() == [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def test_a_rank_that_is_killed_ends_the_others_with_status_1(task):
    words = task.words("lost", **{"model.num_gpus_per_node": 2, "train.max_epochs": 4000})
    command = [sys.executable, "-m", "openrlhf_ext.cli.train_sft", *words]
    metrics = task.folder / "lost/metrics.jsonl"
    with subprocess.Popen(command, env=os.environ | FORKED, stderr=subprocess.PIPE) as process:
        until(
            lambda: (
                process.poll() is not None
                or (metrics.exists() and "loss/sft" in metrics.read_text())
            ),
            "a step",
        )
        behind(psutil.Process(process.pid)).children()[1].kill()
        said = process.communicate(timeout=PATIENCE_S)[1].decode()
    assert process.returncode == 1 and "rank 1 has ended with status -9" in said, said
    assert "Traceback" not in said and "rank 0 waited in vain" in said, said
    assert task.events("lost")[-1]["event"] == "failure"

"""Which checkpoint a run goes on from, what the driver takes from it, and how often it is tried
again."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save as save_arrays

from openrlhf_ext.checkpoints import (
    CheckpointError,
    CheckpointStore,
    Manifest,
    check_files,
    read_manifest,
    write_file,
)
from openrlhf_ext.checkpoints.files import write_plain
from openrlhf_ext.cli import train_ppo_ray
from openrlhf_ext.config import ConfigError, RunConfig, load_config
from openrlhf_ext.driver import guard, job, preflight
from openrlhf_ext.driver.data import PromptData, load_data, open_tokenizer
from openrlhf_ext.driver.rollouts import Group, Prompt, groups_from_plain, plain_groups
from openrlhf_ext.reporting import EventLog
from openrlhf_ext.run import checkpoints
from openrlhf_ext.run.checkpoints import changed_options, plain_options
from tests.driver.simulated import response
from tests.e2e.jobs import Task
from tests.models import make_tiny_policy


def save(store: CheckpointStore, step: int) -> Path:
    entry = write_file(store.begin(step), "policy/data", [b"state" * 9])
    return store.commit(Manifest(step, (entry,)))


@pytest.fixture
def store(tmp_path) -> CheckpointStore:
    store = CheckpointStore(tmp_path, keep=9)
    for step in (1, 2, 10):
        save(store, step)
    return store


def call(method, timeout_s, *, folder, name=None):
    """Ranks that are one, which checks everything."""
    assert (method, name) in (
        ("check_checkpoint", None),
        ("load_state", "policy"),
        ("check_loaded", "policy"),
    )
    return [check_files(Path(folder), read_manifest(Path(folder)).files)]


def find(store: CheckpointStore, fallback: bool) -> str:
    return checkpoints.find_good(store, call, 1.0, fallback=fallback).name


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_the_newest_is_taken(store):
    assert find(store, fallback=False) == "global_step10"


def test_a_damaged_one_stops_the_run_unless_fallback_is_allowed(store, caplog):
    truncate(store.folder / "global_step10/policy/data")
    with pytest.raises(
        CheckpointError,
        match=r"global_step10/policy/data is truncated[\s\S]*--ckpt\.fallback_enable",
    ):
        find(store, fallback=False)
    assert find(store, fallback=True) == "global_step2"
    assert "going back to the checkpoint before it" in caplog.text and "truncated" in caplog.text


def test_foreign_and_missing_manifests_are_damage_too(store):
    (store.folder / "global_step10/manifest.json").write_text('{"format": "x", "version": 1}')
    (store.folder / "global_step2/manifest.json").unlink()
    assert find(store, fallback=True) == "global_step1"
    truncate(store.folder / "global_step1/manifest.json")
    with pytest.raises(CheckpointError, match=r"no checkpoint is usable") as error:
        find(store, fallback=True)
    for words in ("of format 'x'", "holds no manifest.json", "not JSON"):
        assert words in str(error.value)


def test_a_renamed_checkpoint_is_none_of_its_new_step(store):
    (store.folder / "global_step10").rename(store.folder / "global_step12")
    told = (
        r"global_step12 is not usable:\s+its name says step 12, its manifest.json step 10: "
        r"rename it to global_step10"
    )
    with pytest.raises(CheckpointError, match=told):
        find(store, fallback=False)
    assert find(store, fallback=True) == "global_step2"


def test_the_best_is_that_of_the_checkpoint_the_run_goes_on_from(tmp_path, store):
    best = {"step": 2, "metric": "eval/accuracy", "value": 0.5}
    folder = store.begin(11)
    arrays = {"tokens": np.arange(3, dtype=np.int32)}
    files = (
        write_file(folder, "policy/data", [b"x"]),
        write_plain(folder, "controller.json", {"options": {}}),
        write_file(folder, "groups.safetensors", [save_arrays(arrays)]),
    )
    store.commit(Manifest(11, files, {"best": best}))
    store.mark_best({"step": 1, "metric": "eval/accuracy", "value": 0.1})
    ckpt = RunConfig().ckpt.model_copy(update={"path": str(tmp_path), "load_enable": True})
    resumed = checkpoints.restore(
        RunConfig().model_copy(update={"ckpt": ckpt}), {"policy": call}, {}, 1.0, EventLog()
    )
    assert (
        resumed.step == 11
        and store.best() == best
        and resumed.arrays["tokens"].tolist() == [0, 1, 2]
    )


def test_a_run_that_finds_no_checkpoint_is_told_where_an_earlier_start_has_put_them(
    tmp_path, store, caplog
):
    ckpt = RunConfig().ckpt.model_copy(update={"path": str(tmp_path), "load_enable": True})
    aside = store.set_aside_all()
    config = RunConfig().model_copy(update={"ckpt": ckpt})
    assert checkpoints.restore(config, {"policy": call}, {}, 1.0, EventLog()) is None
    assert (
        f"checkpoints of an earlier run are in {aside}: to go on from them, move them back"
        in caplog.text
    )


def test_a_checkpoint_of_an_earlier_release_is_refused_with_the_remedy(tmp_path, store):
    ckpt = RunConfig().ckpt.model_copy(update={"path": str(tmp_path), "load_enable": True})
    with pytest.raises(
        CheckpointError, match=r"global_step10 holds no groups.safetensors[\s\S]*Hugging Face form"
    ):
        checkpoints.restore(
            RunConfig().model_copy(update={"ckpt": ckpt}), {"policy": call}, {}, 1.0, EventLog()
        )


# ---- the prompts


def test_a_fingerprint_is_of_the_prompts_and_their_order():
    def fingerprint(*prompts):
        return PromptData(list(prompts), ["x"] * len(prompts), [], 0, []).fingerprint

    assert fingerprint("a", "b") == fingerprint("a", "b")
    assert (
        len({fingerprint(*prompts) for prompts in (("a", "b"), ("b", "a"), ("a",), ("a", "c"))})
        == 4
    )


def test_changed_options_are_named_and_immaterial_ones_not():
    config = RunConfig()
    before = plain_options(config)
    ckpt = config.ckpt.model_copy(update={"load_enable": True})
    actor = config.actor.model_copy(update={"max_norm": 0.5})
    changed = config.model_copy(update={"ckpt": ckpt, "actor": actor})
    assert changed_options(before, plain_options(changed)) == ["actor.max_norm: 0.5, it was 1.0"]
    assert "logger.wandb.key" not in before and json.dumps(before)


def test_passwords_are_neither_kept_nor_compared_nor_shown():
    def options(password):
        return plain_options(RunConfig(reward={"remote_url": f"http://me:{password}@grader/f"}))

    assert options("p@ss/w")["reward.remote_url"] == "'http://(hidden)@grader/f'"
    earlier = options("x") | {"reward.remote_url": "'http://me:p@ss/w@grader/f'", "train.seed": "1"}
    assert changed_options(earlier, options("other")) == [
        f"train.seed: {RunConfig().train.seed}, it was 1"
    ]


# ---- before anything starts


class Saved:
    """A run of a task that has saved step 3, with ranks that write what a checkpoint says of a
    model."""

    def __init__(self, task: Task, *words: str) -> None:
        self.task, self.config = task, load(task, *words)
        models = preflight.trained_models(self.config)

        def call(method, timeout_s, *, name, folder, background):
            assert method == "save_state"
            return [[write_plain(Path(folder), f"{name}/state.json", models[name])]]

        tokenizer = open_tokenizer(self.config)
        prompts = load_data(self.config, tokenizer)[0].fingerprint
        checkpointer = job.build_checkpointer(
            self.config, dict.fromkeys(models, call), prompts, EventLog()
        )
        checkpointer.save(3, {"step": 3}, {})
        self.folder = checkpointer.store.path_of(3)

    def dry_run(self, capsys, *words: str) -> tuple[int, str]:
        capsys.readouterr()
        status = train_ppo_ray.main(
            [*self.task.options("out"), *words, "--ckpt.load_enable", "--dry_run"]
        )
        return status, "".join(capsys.readouterr())


def load(task: Task, *words: str) -> RunConfig:
    return load_config([*task.options("out"), *words])


LORA = ("--ds.lora.rank", "8", "--ds.lora.alpha", "16")


def test_a_dry_run_says_everything_that_going_on_would_refuse(tmp_path, capsys):
    saved = Saved(Task.make(tmp_path), *LORA)
    status, said = saved.dry_run(capsys, *LORA, "--train.seed", "7")
    assert status == 0 and said.startswith("would start") and f"goes on from {saved.folder}" in said
    assert "with another train.seed: 7, it was 42" in said
    sizes = (
        "--megatron.tensor_parallel_size",
        "1",
        "--ckpt.save_steps",
        "1",
        "--rollout.batch_size",
        "16",
    )
    assert saved.dry_run(capsys, *LORA, *sizes)[0] == 0, "layouts and sizes of batches may differ"

    other = (
        "--ds.lora.rank",
        "8",
        "--ds.lora.alpha",
        "32",
        "--data.max_samples",
        "16",
        "--megatron.param_dtype",
    )
    status, said = saved.dry_run(capsys, *other, "bf16", "--data.dataloader_num_workers", "1")
    assert status == 2 and said.startswith("4 problems in the configuration:\n- ckpt.load_enable: ")
    for part in (
        "was written by a run with other prompts",
        "data.max_samples: 16, it was 1",
        "ds.lora.alpha 16, here 32",
        "holds fp32 parameters, megatron.param_dtype is bf16",
        "other workers (data.dataloader_num_workers: 1, it was",
    ):
        assert part in said
    status, said = saved.dry_run(capsys)
    assert status == 2 and "holds adapters, this run trains whole weights" in said

    make_tiny_policy(tmp_path / "wide", seed=1, intermediate_size=384)
    status, said = saved.dry_run(
        capsys, *LORA, "--actor.model_name_or_path", str(tmp_path / "wide")
    )
    assert status == 2 and "is of another model: ffn_hidden_size 256, the model has 384" in said
    (tmp_path / "prompts.jsonl").write_text('{"question": "1 + 1 =", "answer": "#### 2"}\n' * 24)
    status, said = saved.dry_run(capsys, *LORA)
    assert status == 2 and "was written by a run with other prompts" in said, (
        "the same name with another content"
    )


def test_a_dry_run_knows_damage_and_a_run_without_a_checkpoint(tmp_path, capsys):
    saved = Saved(Task.make(tmp_path))
    state = saved.folder / "policy/state.json"
    state.write_bytes(state.read_bytes().replace(b"fp32", b"bf16"))
    critic = ("--algo.advantage.estimator", "gae", "--critic.num_gpus_per_node", "2")
    status, said = saved.dry_run(capsys, *critic)
    assert status == 2 and "policy/state.json is corrupted" in said and "holds no critic" in said
    truncate(state)
    status, said = saved.dry_run(capsys, "--ckpt.fallback_enable")
    assert status == 2 and "no checkpoint is usable" in said and "state.json is truncated" in said
    shutil.rmtree(saved.folder)
    status, said = saved.dry_run(capsys)
    assert (
        status == 0
        and f"no checkpoint in {saved.folder.parent} yet: the run starts from the beginning" in said
    )
    status, said = saved.dry_run(capsys, "--actor.model_name_or_path", "org/name")
    assert status == 3 and said.startswith(
        "cannot say: actor.model_name_or_path org/name, which is not"
    )


def test_a_run_that_cannot_go_on_ends_before_ray_starts(tmp_path, monkeypatch):
    saved = Saved(Task.make(tmp_path), *LORA)
    monkeypatch.setattr(job, "run_once", lambda *_: 0)
    assert job.run(load(saved.task, *LORA, "--ckpt.load_enable"), guard.Guard()) == 0
    monkeypatch.setattr(job, "run_once", lambda *_: pytest.fail("the run began"))
    with pytest.raises(ConfigError, match="2 problems(.|\n)*other prompts(.|\n)*ds.lora.alpha 16"):
        words = (
            "--ds.lora.rank",
            "8",
            "--ds.lora.alpha",
            "4",
            "--data.max_samples",
            "16",
            "--ckpt.load_enable",
        )
        job.run(load(saved.task, *words), guard.Guard())


# ---- storage


def test_folders_that_a_rank_does_not_see_are_refused_before_training(tmp_path):
    config = RunConfig()
    ckpt = {"output_dir": str(tmp_path / "out"), "path": str(tmp_path / "ckpt"), "save_steps": 5}
    config = config.model_copy(update={"ckpt": config.ckpt.model_copy(update=ckpt)})
    blind: dict[str, list[bool]] = {}

    def call(method, timeout_s, *, path):
        assert (method, Path(path).stat().st_size) == ("sees", 0)
        return blind.get(Path(path).parent.name, [True, True])

    checkpoints.check_shared_folders(config, call, 1.0)
    blind["out"] = [True, False]  # only rank 0 writes there
    checkpoints.check_shared_folders(config, call, 1.0)
    blind["ckpt"] = [True, False]
    with pytest.raises(
        CheckpointError, match=r"ckpt\.path must be on storage that all .* ranks \[1\]"
    ):
        checkpoints.check_shared_folders(config, call, 1.0)
    blind["out"] = [False, True]
    with pytest.raises(
        CheckpointError, match=r"ckpt\.output_dir must be on storage that all .* ranks \[0\]"
    ):
        checkpoints.check_shared_folders(config, call, 1.0)
    assert not list(tmp_path.rglob(".seen*"))


def test_a_run_asks_before_it_trains(monkeypatch):
    def refuse(config, call, timeout_s):
        raise CheckpointError(f"{call.args[0]} do not see it")

    monkeypatch.setattr(job, "clean_up", lambda config: None)
    monkeypatch.setattr(job, "build_parts", lambda *_: SimpleNamespace(policy="the ranks"))
    monkeypatch.setattr(job, "check_shared_folders", refuse)
    monkeypatch.setattr(job, "build_loop", lambda *_: pytest.fail("the run went on"))
    with pytest.raises(CheckpointError, match="the ranks do not see it"):
        job.train(RunConfig(), None, None)


# ---- the end


@pytest.mark.parametrize("end", [KeyboardInterrupt, CheckpointError])
def test_a_run_that_ends_early_saves_if_it_should_and_closes_its_logs_while_its_processes_live(
    monkeypatch, end
):
    told = []

    def run():
        raise end("now")

    loop = SimpleNamespace(
        run=run,
        save_before_the_end=lambda: told.append("save"),
        close_logs=lambda: told.append("close"),
    )
    for name in ("clean_up", "check_shared_folders"):
        monkeypatch.setattr(job, name, lambda *_: None)
    monkeypatch.setattr(job, "build_parts", lambda *_: SimpleNamespace(policy=None, steps=1))
    monkeypatch.setattr(job, "build_loop", lambda *_: loop)
    session = SimpleNamespace(guard=guard.Guard(), remember_children=lambda: None, processes={})
    with pytest.raises(end):
        job.train(RunConfig(), session, EventLog())
    assert told == ["save", "close"] if end is KeyboardInterrupt else told == ["close"]


# ---- restarts


@pytest.mark.parametrize(
    ("codes", "limit", "expected"),
    [
        ([1, 137, 0], 3, 0),
        ([1, 1, 1], 2, 1),
        ([130], 3, 130),
        ([143], 3, 143),
        ([2], 3, 2),
        ([1], 0, 1),
    ],
)
def test_a_failed_run_is_restarted_from_its_checkpoint_up_to_n_times(
    tmp_path, codes, limit, expected
):
    config = RunConfig(train={"max_restarts": limit}, ckpt={"path": str(tmp_path)})
    loads, left, restarts = [], list(codes), []

    def attempt(config, restart):
        loads.append(config.ckpt.load_enable)
        restarts.append(restart)
        return left.pop(0)

    assert guard.run_with_restarts(config, attempt) == expected
    assert restarts == list(range(len(codes)))
    assert not left and loads == [False] + [True] * (len(codes) - 1)


def test_a_run_that_starts_anew_moves_the_final_model_of_another_aside(tmp_path, caplog):
    given = {
        "path": str(tmp_path / "steps"),
        "output_dir": str(tmp_path / "out"),
        "load_enable": True,
    }
    (tmp_path / "steps").mkdir()
    saved = save(CheckpointStore(tmp_path / "steps", keep=3), 1)
    model = (
        "config.json",
        "tokenizer.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
    )
    for folder in (tmp_path / "out", tmp_path / "out_critic"):
        for name in (*model, "notes.txt"):
            write_file(folder, name, [name.encode()])
    with checkpoints.own_folders(RunConfig(ckpt=given)):
        pass
    assert (tmp_path / "out/config.json").exists(), "a run that goes on replaces its own"
    saved.rename(tmp_path / "moved")  # there is nothing to go on from
    for number, load_enable in ((1, True), (2, False)):
        with checkpoints.own_folders(RunConfig(ckpt=given | {"load_enable": load_enable})):
            pass
        for folder in (tmp_path / "out", tmp_path / "out_critic"):
            aside = folder / f"superseded.{number}"
            assert sorted(p.name for p in aside.iterdir()) == sorted(model)
            assert {p.name for p in folder.iterdir() if p.is_file()} - {".lock"} == {"notes.txt"}
            assert (
                f"{folder} holds the final model of an earlier run: moved to {aside}" in caplog.text
            )
            for name in model:
                write_file(folder, name, [name.encode()])


def test_completions_that_wait_for_a_reward_model_still_do_when_a_run_goes_on():
    made = dataclasses.replace(response("text", 3, 3), reward=None, score=None)
    plain, arrays = plain_groups([Group(Prompt(5, "text", None), [made])])
    (group,) = groups_from_plain(json.loads(json.dumps(plain)), arrays)
    (again,) = group.responses
    assert (again.reward, again.score, group.prompt.number) == (None, None, 5)
    assert np.array_equal(again.tokens_S, made.tokens_S) and np.array_equal(
        again.logprobs_T, made.logprobs_T
    )

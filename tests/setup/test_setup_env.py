"""The logic of examples/scripts/setup_env.sh on an empty checkout, with a stub in place of Python
and pip."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from openrlhf_ext.cli.doctor import OLDEST_DRIVER
from tests.patience import PATIENCE_S, until

ROOT = Path(__file__).resolve().parents[2]
NEEDED_FILES = (
    "examples/scripts/setup_env.sh",
    "requirements/build.lock",
    "requirements/cpu.lock",
    "requirements/dev.lock",
    "requirements/gpu.lock",
    "requirements/triton.lock",
    "setup.py",
    "pyproject.toml",
)
PHASES = ["venv", "tools", "packages", "dev", "triton", "torch", "deepspeed", "project", "check"]

# Answers as the script expects of an interpreter: its version, its include folder; `-m venv DIR`
# puts a copy of itself there; every call of pip and of the doctor is written down, that of a
# compilation with its variables. Calls that match
# $STUB_FAIL fail, those that match $STUB_SLOW wait for the file $STUB_GATE.
STUB = r"""#!/usr/bin/env bash
if [[ $1 == -c && $2 == *include* ]]; then echo "$STUB_INCLUDE"; exit; fi
if [[ $1 == -c ]]; then echo "${STUB_VERSION:-3.11.9}"; exit; fi
if [[ $* == "-m pip --version" ]]; then exit; fi
echo "$*" >>"$STUB_CALLS"
if [[ -n ${STUB_FAIL:-} && $* == $STUB_FAIL ]]; then
    for line in $(seq 30); do echo "stub output $line"; done
    echo "stub error: no matching distribution" >&2
    exit 3
fi
if [[ -n ${STUB_SLOW:-} && $* == $STUB_SLOW ]]; then
    printf 'Collecting numpy==2.2.6 (from cpu.lock)\n  Downloading numpy\nCollecting pandas==2.2 (from cpu.lock)\n'
    touch "$STUB_GATE.reached"
    for _ in $(seq 1200); do [[ -e $STUB_GATE ]] && break; sleep 0.05; done
fi
for name in CUDA_HOME CPATH MAX_JOBS NVTE_FRAMEWORK NVTE_PYTORCH_FORCE_BUILD; do
    if [[ $* == *transformer-engine-torch* ]]; then echo "$name=${!name}" >>"$STUB_CALLS"; fi
done
if [[ $2 == venv ]]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name that holds what the set-up reads, and nothing else."""
    checkout = tmp_path / "my checkout"
    for name in NEEDED_FILES:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, checkout / name)
    return checkout


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Goes first on PATH; has stubs for all interpreters that the script looks for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("python3.11", "python3.12", "python3"):
        write_executable(folder / name, STUB)
    # or the set-up would install it on this machine
    write_executable(folder / "chromium", "#!/bin/sh\n")
    return folder


@pytest.fixture
def start(checkout: Path, bin_folder: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the set-up in a process group of its own."""

    def start(*arguments: str, root: Path = checkout, **env: str) -> subprocess.Popen[str]:
        ours = ("OPENRLHF_EXT_", "PIP_", "CUDA_", "NVTE_")
        others = ("PYTHON", "CPATH", "MAX_JOBS")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours) and k not in others}
        return subprocess.Popen(
            ["bash", str(root / "examples/scripts/setup_env.sh"), *arguments],
            env={
                **clean,
                "PATH": f"{bin_folder}:{clean['PATH']}",
                "STUB_CALLS": str(tmp_path / "calls"),
                "STUB_GATE": str(tmp_path / "gate"),
                "STUB_INCLUDE": str(tmp_path),
                **env,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture
def setup(start: Callable[..., subprocess.Popen[str]], checkout: Path) -> Setup:
    def run(*arguments: str, root: Path = checkout, **env: str) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, root=root, **env)
        stdout, stderr = process.communicate(timeout=PATIENCE_S)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    return run


@pytest.fixture
def calls(tmp_path: Path) -> Callable[[], list[str]]:
    """The calls of Python since the last look."""

    def take() -> list[str]:
        path = tmp_path / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    return take


def write_executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def phases_of(output: str) -> list[str]:
    return re.findall(r"^set-up: (\w+) +\d+ s$", output, re.MULTILINE)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root installs packages of the system")
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (0, r"set-up: browser +\d+ s"),
        (100, r"set-up: browser +no Chromium \(.*/setup\.log says why\)"),
    ],
)
def test_the_browser_of_the_tests_is_installed_where_that_is_possible(
    setup: Setup, bin_folder: Path, tmp_path: Path, status: int, said: str
) -> None:
    (bin_folder / "chromium").unlink()
    write_executable(
        bin_folder / "apt-get", f'#!/bin/bash\necho "$*" >>{tmp_path}/apt\nexit {status}\n'
    )
    others = tmp_path / "system"
    others.mkdir()
    for program in Path("/usr/bin").iterdir():
        if program.name not in ("chromium", "apt-get"):
            (others / program.name).symlink_to(program)
    result = setup("dev", PATH=f"{bin_folder}:{others}")
    assert result.returncode == 0 and re.search(said, result.stdout), result.stdout + result.stderr
    wanted = ["update", "install -y --no-install-recommends chromium fonts-dejavu-core"]
    assert (tmp_path / "apt").read_text().splitlines() == (wanted if status == 0 else wanted[:1])
    (tmp_path / "apt").unlink()
    setup(PATH=f"{bin_folder}:{others}")
    assert not (tmp_path / "apt").exists(), "only the set-up for development"


def test_phases_run_in_order_with_a_timed_line_each(setup: Setup, calls, checkout: Path) -> None:
    result = setup("dev")
    assert result.returncode == 0, result.stderr
    assert phases_of(result.stdout) == PHASES
    assert calls() == [
        f"-m venv {checkout}/.venv",
        "-m pip install -r requirements/build.lock",
        "-m pip install --no-deps --ignore-requires-python -r requirements/cpu.lock",
        "-m pip install --no-deps -r requirements/dev.lock",
        f"-m pip install --no-deps --upgrade --target {checkout}/.venv/triton -r "
        "requirements/triton.lock",
        "-m pip install torch==2.13.0",
        "-m pip uninstall -y torchvision torchaudio torchcodec triton",
        "-m pip install --use-pep517 --no-deps deepspeed==0.19.6",
        "-m pip install --no-deps --no-build-isolation -e .",
        "-m openrlhf_ext.cli.doctor",
    ]


def test_users_without_tests_get_no_test_tools(setup: Setup, calls) -> None:
    assert phases_of(setup().stdout) == [
        phase for phase in PHASES if phase not in ("dev", "triton")
    ]
    assert not any("dev.lock" in call or "triton.lock" in call for call in calls())


def test_a_second_run_does_nothing(setup: Setup, calls) -> None:
    setup("dev")
    calls()
    result = setup("dev")
    assert (result.returncode, result.stdout, calls()) == (0, "", [])


def test_a_changed_lock_file_repeats_its_phase_and_the_check(setup: Setup, checkout: Path) -> None:
    setup("dev")
    with (checkout / "requirements/cpu.lock").open("a") as lock:
        lock.write("another==1.0\n")
    assert phases_of(setup("dev").stdout) == ["packages", "check"]


def test_a_moved_checkout_installs_the_project_again(
    setup: Setup, checkout: Path, tmp_path: Path
) -> None:
    setup()
    moved = checkout.rename(tmp_path / "moved")
    assert phases_of(setup(root=moved).stdout) == ["project", "check"]


def test_failure_shows_phase_end_of_log_and_remedy_then_resumes(
    setup: Setup, checkout: Path
) -> None:
    failed = setup("dev", STUB_FAIL="*torch==2.13.0")
    assert failed.returncode == 1
    assert phases_of(failed.stdout) == PHASES[:5]
    assert "set-up failed in phase 'torch' (exit status 3)" in failed.stderr
    assert "stub error: no matching distribution" in failed.stderr
    assert "stub output 30" in failed.stderr and "stub output 2\n" not in failed.stderr
    assert "What to do: torch==2.13.0, CPU or CUDA build" in failed.stderr
    assert "stub output 1\n" in (checkout / ".venv/setup.log").read_text()

    assert phases_of(setup("dev").stdout) == PHASES[5:]


def test_an_interrupted_set_up_goes_on_where_it_stopped(
    start, setup: Setup, tmp_path: Path
) -> None:
    process = start("dev", STUB_SLOW="*cpu.lock")
    until((tmp_path / "gate.reached").exists, "the gate is reached")
    # more than once: bash takes no notice of one that comes at the moment in which a command of its
    # ends by itself
    until(
        lambda: process.poll() is not None or os.killpg(process.pid, signal.SIGINT),
        "the set-up has ended",
    )
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert phases_of(setup("dev").stdout) == PHASES[2:]


def test_two_at_once_install_only_once(start, tmp_path: Path) -> None:
    first = start(STUB_SLOW="*cpu.lock")
    until((tmp_path / "gate.reached").exists, "the gate is reached")
    second = start()
    assert "waiting for another set-up" in second.stdout.readline()
    (tmp_path / "gate").touch()
    first_output, _ = first.communicate(timeout=PATIENCE_S)
    second_output, _ = second.communicate(timeout=PATIENCE_S)
    assert first.returncode == second.returncode == 0
    assert phases_of(first_output) and not phases_of(second_output)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        ("-m venv*", "python3.11-venv"),
        ("*cpu.lock", "goes on with this phase"),
        ("*deepspeed*", "isolated environment"),
        ("*doctor", "says what is missing"),
    ],
)
def test_each_failure_has_a_remedy(setup: Setup, call: str, remedy: str) -> None:
    failed = setup(STUB_FAIL=call)
    assert failed.returncode == 1
    assert remedy in failed.stderr


def test_no_suitable_python_is_said_before_anything_happens(
    setup: Setup, calls, checkout: Path
) -> None:
    failed = setup(STUB_VERSION="3.9.18")
    assert failed.returncode == 1
    assert "no suitable Python. Needed: 3.11 (the tested one) or 3.12" in failed.stderr
    assert "python3 is 3.9.18" in failed.stderr and "PYTHON=/path/to/python3.11" in failed.stderr
    assert calls() == [] and not (checkout / ".venv").exists()


def test_python_311_is_preferred_and_others_are_tried(
    setup: Setup, calls, bin_folder: Path, checkout: Path
) -> None:
    write_executable(bin_folder / "python3.11", "#!/bin/sh\nexit 127\n")
    write_executable(bin_folder / "python3.12", STUB.replace("3.11.9", "3.12.1"))
    assert setup().returncode == 0
    assert (checkout / ".venv/.setup/venv").read_text().strip() == "3.12.1"


def test_python_variable_names_the_interpreter(
    setup: Setup, tmp_path: Path, checkout: Path
) -> None:
    mine = tmp_path / "my python"
    write_executable(mine, STUB.replace("3.11.9", "3.12.7"))
    assert setup(PYTHON=str(mine)).returncode == 0
    assert (checkout / ".venv/.setup/venv").read_text().strip() == "3.12.7"

    absent = setup(PYTHON="/nowhere/python", OPENRLHF_EXT_VENV=str(tmp_path / "other"))
    assert absent.returncode == 1 and "Looked for: /nowhere/python" in absent.stderr


def test_an_environment_of_another_checkout_is_not_taken_over(
    setup: Setup, calls, checkout, tmp_path
) -> None:
    other = tmp_path / "other checkout"
    (other / "openrlhf_ext").mkdir(parents=True)
    about = (
        checkout / ".venv/lib/python3.11/site-packages/openrlhf_ext-0.1.0.dist-info/direct_url.json"
    )
    about.parent.mkdir(parents=True)
    about.write_text(json.dumps({"dir_info": {"editable": True}, "url": other.as_uri()}))
    refused = setup()
    assert refused.returncode != 0 and not calls(), "nothing is installed"
    assert (
        f"is the environment of the checkout {other}, and whoever uses it runs the code there"
        in refused.stderr
    )
    assert (
        "OPENRLHF_EXT_VENV=/other/folder" in refused.stderr
        and "-m pip uninstall openrlhf_ext" in refused.stderr
    )
    about.write_text(json.dumps({"dir_info": {"editable": True}, "url": checkout.as_uri()}))
    assert setup().returncode == 0, "its own"
    about.write_text(json.dumps({"dir_info": {"editable": True}, "url": other.as_uri()}))
    shutil.rmtree(other)
    assert setup().returncode == 0, "one that is gone"


def test_an_environment_of_another_python_is_not_mixed(setup: Setup, tmp_path: Path) -> None:
    setup()
    other = tmp_path / "other"
    write_executable(other, STUB.replace("3.11.9", "3.12.7"))
    failed = setup(PYTHON=str(other))
    assert failed.returncode == 1
    assert "holds Python 3.11.9" in failed.stderr and "is 3.12.7: remove" in failed.stderr


def test_too_little_disk_is_said_with_both_numbers(setup: Setup, calls, bin_folder: Path) -> None:
    write_executable(bin_folder / "df", "#!/bin/sh\necho header\necho /dev/x 99 9 3145728 75% /\n")
    failed = setup()
    assert failed.returncode == 1
    assert "8 GB needed, 3 GB free" in failed.stderr and "OPENRLHF_EXT_VENV=" in failed.stderr
    assert calls() == []
    assert setup(OPENRLHF_EXT_MIN_DISK_GB="2").returncode == 0
    assert setup().returncode == 0, "a finished environment needs no disk"


def test_environment_can_be_placed_elsewhere(setup: Setup, tmp_path: Path, checkout: Path) -> None:
    assert setup(OPENRLHF_EXT_VENV=str(tmp_path / "elsewhere")).returncode == 0
    assert (tmp_path / "elsewhere/bin/python").exists() and not (checkout / ".venv").exists()


def test_torch_can_come_from_an_index_of_its_own(setup: Setup, calls) -> None:
    setup(OPENRLHF_EXT_TORCH_INDEX="file:///wheels")
    assert "-m pip install --index-url file:///wheels torch==2.13.0" in calls()


def test_an_existing_environment_is_taken_over(setup: Setup, calls, checkout: Path) -> None:
    python = checkout / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    write_executable(python, STUB)
    assert setup().returncode == 0
    assert not any("-m venv" in call for call in calls())


def test_sourcing_scripts_get_the_interpreter(
    checkout: Path, setup: Setup, bin_folder: Path, tmp_path: Path
) -> None:
    setup()
    script = (
        f'source "{checkout}/examples/scripts/setup_env.sh"; setup_env; echo "$VENV_PYTHON"; '
        "command -v python"
    )
    result = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert result.stdout.splitlines() == [f"{checkout}/.venv/bin/python"] * 2


def test_a_wrong_argument_is_refused(setup: Setup) -> None:
    failed = setup("devel")
    assert failed.returncode == 1 and "'devel'" in failed.stderr


# --- gpu
# --------------------------------------------------------------------------------------------------

GPU_PHASES = [
    "venv",
    "tools",
    "torch",
    "packages",
    "transformer_engine",
    "deepspeed",
    "project",
    "check",
]


@pytest.fixture
def gpu_host(bin_folder: Path, tmp_path: Path) -> Path:
    """Stubs of a machine that can take the GPU stack; the folder goes first on PATH."""
    write_executable(bin_folder / "nvidia-smi", "#!/bin/sh\necho 580.65.06\necho 580.65.06\n")
    write_executable(bin_folder / "getconf", "#!/bin/sh\necho glibc 2.31\n")
    write_executable(bin_folder / "nproc", "#!/bin/sh\necho 64\n")
    for name in ("gcc", "g++"):
        write_executable(bin_folder / name, "#!/bin/sh\nexit 0\n")
    write_executable(
        bin_folder / "df", f"#!/bin/sh\necho header\necho /dev/x 99 9 {20 * 2**20} 75% /\n"
    )
    (tmp_path / "Python.h").touch()
    return bin_folder


def test_the_gpu_stack_is_installed_in_the_order_that_its_builds_need(
    setup: Setup, calls, checkout: Path, gpu_host: Path
) -> None:
    result = setup("gpu")
    assert result.returncode == 0, result.stderr
    assert phases_of(result.stdout) == GPU_PHASES
    venv = checkout / ".venv"
    nvidia = venv / "lib/python3.11/site-packages/nvidia"
    assert calls() == [
        f"-m venv {venv}",
        "-m pip install -r requirements/build.lock",
        "-m pip install --no-deps torch==2.13.0",
        f"-m pip install --no-deps --ignore-requires-python -r {venv}/.setup/gpu.txt",
        "-m pip install --no-deps --no-build-isolation --no-cache-dir --force-reinstall "
        "transformer-engine-torch==2.11.0",
        f"CUDA_HOME={nvidia}/cu13",
        f"CPATH={nvidia}/cudnn/include:{nvidia}/nccl/include",
        "MAX_JOBS=16",
        "NVTE_FRAMEWORK=pytorch",
        "NVTE_PYTORCH_FORCE_BUILD=TRUE",
        "-m pip install --use-pep517 --no-deps deepspeed==0.19.6",
        "-m pip install --no-deps --no-build-isolation -e .",
        "-m openrlhf_ext.cli.doctor",
    ]
    left_out = {"torch", "deepspeed", "transformer-engine-torch"}
    whole = (checkout / "requirements/gpu.lock").read_text().splitlines()
    installed = (venv / ".setup/gpu.txt").read_text().splitlines()
    assert installed == [line for line in whole if line.split("==")[0] not in left_out]
    assert len(installed) == len(whole) - len(left_out)


def test_a_finished_gpu_stack_is_left_alone_even_where_there_is_no_gpu(
    setup: Setup, calls, gpu_host: Path
) -> None:
    setup("gpu")
    calls()
    (gpu_host / "nvidia-smi").unlink()
    result = setup("gpu")
    assert (result.returncode, result.stdout, calls()) == (0, "", [])


def test_an_image_is_built_where_there_is_no_gpu(setup: Setup, calls, gpu_host: Path) -> None:
    (gpu_host / "nvidia-smi").unlink()
    result = setup("gpu", OPENRLHF_EXT_WITHOUT_GPU="1")
    assert result.returncode == 0, result.stderr
    assert phases_of(result.stdout)[-1] == "project" and not [
        call for call in calls() if "doctor" in call
    ]


def test_settings_of_the_user_reach_the_compilers(
    setup: Setup, calls, checkout: Path, gpu_host: Path
) -> None:
    setup("gpu", CPATH="/my/include", MAX_JOBS="3", CUDA_HOME="/old/cuda")
    made = calls()
    assert "MAX_JOBS=3" in made
    assert any(
        call.startswith("CPATH=") and call.endswith("/nccl/include:/my/include") for call in made
    )
    assert f"CUDA_HOME={checkout}/.venv/lib/python3.11/site-packages/nvidia/cu13" in made, (
        "headers of torch's CUDA"
    )


@pytest.mark.parametrize(
    ("stubs", "says"),
    [
        ({"nvidia-smi": "exit 9"}, "nvidia-smi tells no driver: run this on a machine with a GPU"),
        ({"nvidia-smi": "echo 'No devices were found'"}, "nvidia-smi tells no driver"),
        (
            {"nvidia-smi": "echo 570.124.06"},
            "NVIDIA's driver is 570.124.06, CUDA 13 needs 580 or newer",
        ),
        ({"getconf": "echo glibc 2.28"}, "glibc is 2.28, the packages need 2.31 or newer"),
        ({"g++": "exit 1"}, "g++ is missing or too old for C++20"),
        (
            {"df": f"echo header; echo /dev/x 99 9 {20 * 2**20 - 1} 75% /"},
            "20 GB needed, 19 GB free",
        ),
    ],
)
def test_a_host_that_is_not_ready_is_refused_before_a_download(
    setup: Setup, calls, gpu_host: Path, checkout: Path, stubs: dict[str, str], says: str
) -> None:
    for name, text in stubs.items():
        write_executable(gpu_host / name, f"#!/bin/sh\n{text}\n")
    failed = setup("gpu")
    assert failed.returncode == 1 and calls() == []
    assert "not ready for the GPU stack, nothing was installed" in failed.stderr
    (line,) = failed.stderr.strip().splitlines()[1:]
    assert says in line
    assert not (checkout / ".venv/.setup/stack").exists(), "the CPU stack can still come here"


def test_everything_that_a_host_lacks_is_in_one_report(
    setup: Setup, calls, gpu_host: Path, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"  # a PATH without compilers, whatever this machine has
    tools.mkdir()
    for (
        name
    ) in "bash awk dirname realpath mkdir flock timeout head sort cat sed cut sha256sum".split():
        (tools / name).symlink_to(shutil.which(name))
    for name in ("gcc", "g++"):
        (gpu_host / name).unlink()
    write_executable(gpu_host / "nvidia-smi", "#!/bin/sh\necho 550.1\n")
    write_executable(gpu_host / "getconf", "#!/bin/sh\necho glibc 2.17\n")
    write_executable(gpu_host / "df", "#!/bin/sh\necho header\necho /dev/x 99 9 1048576 75% /\n")
    (tmp_path / "Python.h").unlink()
    failed = setup("gpu", PATH=f"{gpu_host}:{tools}")
    assert failed.returncode == 1 and calls() == []
    driver, glibc, compiler, header, disk = failed.stderr.strip().splitlines()[1:]
    assert "550.1" in driver and "2.17" in glibc and "gcc is missing, Triton calls it" in compiler
    assert f"{tmp_path}/Python.h is missing" in header and "python3.11-dev" in header
    assert "20 GB needed, 1 GB free" in disk and "OPENRLHF_EXT_VENV=" in disk


@pytest.mark.parametrize(("first", "second"), [("gpu", "dev"), ("dev", "gpu")])
def test_one_stack_is_not_installed_over_the_other(
    setup: Setup, calls, gpu_host: Path, checkout: Path, first: str, second: str
) -> None:
    assert setup(first).returncode == 0
    calls()
    if first == "dev":  # as older versions of the script left it
        (checkout / ".venv/.setup/stack").unlink()
    failed = setup(second)
    held = "cpu" if first == "dev" else "gpu"
    assert failed.returncode == 1 and calls() == []
    assert f"holds the {held} stack" in failed.stderr and "OPENRLHF_EXT_VENV=" in failed.stderr


def test_a_failed_compilation_has_a_remedy_and_is_repeated_alone(
    setup: Setup, gpu_host: Path
) -> None:
    failed = setup("gpu", STUB_FAIL="*transformer-engine-torch*")
    assert failed.returncode == 1
    assert "failed in phase 'transformer_engine'" in failed.stderr and "MAX_JOBS" in failed.stderr
    assert phases_of(setup("gpu").stdout) == GPU_PHASES[4:]


def test_another_torch_compiles_the_extension_again(setup: Setup, gpu_host: Path) -> None:
    setup("gpu")
    again = setup("gpu", OPENRLHF_EXT_TORCH_INDEX="file:///wheels")
    assert phases_of(again.stdout) == ["torch", "transformer_engine", "check"]


def test_the_script_and_the_doctor_ask_for_the_same_driver_and_the_lock_for_no_newer_glibc() -> (
    None
):
    script = (ROOT / "examples/scripts/setup_env.sh").read_text()
    assert f"OLDEST_DRIVER={OLDEST_DRIVER[13]}\n" in script
    (newest,) = re.findall(
        r"^NEWEST_GLIBC=(\d+)", (ROOT / "requirements/lock_gpu.sh").read_text(), re.MULTILINE
    )
    assert f"OLDEST_GLIBC=2.{newest}\n" in script


def test_a_long_phase_says_what_it_fetches_and_how_far_it_is(
    start, checkout: Path, tmp_path: Path
) -> None:
    script = checkout / "examples/scripts/setup_env.sh"
    script.write_text(script.read_text().replace("\nLINE_EVERY_S=30 ", "\nLINE_EVERY_S=1 "))
    process = start(STUB_SLOW="*cpu.lock*")
    lines = iter(process.stdout.readline, "")
    said = next(line for line in lines if line.startswith("set-up: packages goes on"))
    (tmp_path / "gate").touch()
    rest, errors = process.communicate(timeout=PATIENCE_S)
    total = (checkout / "requirements/cpu.lock").read_text().count("==")
    assert re.fullmatch(
        rf"set-up: packages goes on: [12] s  2 of {total} packages fetched, pandas\n", said
    ), said
    assert process.returncode == 0 and phases_of(rest)[0] == "packages" and "\r" not in rest, (
        rest + errors
    )

#!/usr/bin/env bash
# Writes requirements/gpu.lock: the extra `gpu` of setup.py, resolved for Python 3.11 and 3.12 on x86_64 Linux.
#
#   bash requirements/lock_gpu.sh
#
# Takes some ten minutes and needs no GPU: pip reads the metadata of the packages and downloads none of them.
# Each version is resolved by a Python of that version, because pip evaluates the markers of requirements for the Python
# it runs in, whatever --python-version says: vLLM bounds setuptools for 3.12 alone.
#
# Variables that you may set:
#   PYTHON311, PYTHON312   the interpreters          (default: python3.11, python3.12)
#   PIP_CONFIG_FILE        pip's own; /dev/null keeps out an index or find-links that offers torch's CPU build

set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
LOCK=$ROOT/requirements/gpu.lock
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
PIP=26.3 # the one that was tried
NEWEST_GLIBC=31 # 2.31: setup_env.sh refuses hosts with an older one, so no package may need a newer one

main() {
    local python311 python312
    python311=$(_interpreter 3.11)
    python312=$(_interpreter 3.12)
    _resolve 3.11 "$python311"
    _resolve 3.12 "$python312"
    _merge "$WORK/3.11.json" "$WORK/3.12.json" >"$WORK/gpu.lock"
    mv "$WORK/gpu.lock" "$LOCK"
    echo "lock: wrote $LOCK, $(grep -vc '^#' "$LOCK") lines"
}

_interpreter() {
    local variable=PYTHON${1/./} candidate
    candidate=${!variable:-python$1}
    [[ $("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) == "$1" ]] ||
        _die "Python $1 is needed and '$candidate' is not: set $variable"
    echo "$candidate"
}

# _resolve VERSION INTERPRETER: leaves pip's report as VERSION.json.
_resolve() {
    local venv=$WORK/$1 platforms=(linux_x86_64 manylinux1_x86_64 manylinux2010_x86_64 manylinux2014_x86_64) minor
    for minor in $(seq 5 "$NEWEST_GLIBC"); do platforms+=("manylinux_2_${minor}_x86_64"); done
    echo "lock: resolving for Python $1"
    "$2" -m venv "$venv"
    _pip "$venv" install "pip==$PIP"
    _wanted "$venv" >"$WORK/in.txt"
    _pip "$venv" install --dry-run --ignore-installed --use-feature=fast-deps --report "$WORK/$1.json" \
        --only-binary=:all: --target "$WORK/nowhere" "${platforms[@]/#/--platform=}" -r "$WORK/in.txt"
}

_pip() {
    "$1/bin/python" -m pip --disable-pip-version-check "${@:2}" >"$WORK/log" 2>&1 && return
    tail -n 40 "$WORK/log" >&2
    _die "pip failed, its own words are above; $LOCK is as it was"
}

# What pip resolves: the extra, without what has no wheel or comes without what it requires, but with what that needs.
_wanted() {
    "$1/bin/python" - "$ROOT/setup.py" <<'PY'
import runpy
import sys
from types import SimpleNamespace

# Of what _merge appends: deepspeed, TransformerEngine's torch extension, and megatron-core (numpy, packaging), which
# says that it needs Python 3.12 and has wheels for 3.11 all the same: pip refuses it there.
NEEDED_BY_APART = [
    "hjson", "msgpack", "ninja", "numpy", "packaging>=24.2", "psutil", "py-cpuinfo", "tqdm", "onnx", "onnxscript",
]
APART = ("openrlhf", "deepspeed", "pylatexenc", "megatron-core")
# nvcc and its headers, of torch's CUDA and not of the newest: TransformerEngine's extension is compiled with these, and
# what a newer nvcc emits as PTX is not loaded by a driver of torch's CUDA.
NVCC = ["cuda-toolkit[nvcc,cccl]"]

arguments = {}
sys.modules["setuptools"] = SimpleNamespace(find_packages=lambda **_: [], setup=arguments.update)
runpy.run_path(sys.argv[1])
for requirement in arguments["extras_require"]["gpu"]:
    name, version = requirement.split("==")
    if name in APART:
        continue
    if name == "transformer-engine[core_cu13,pytorch]":
        print(f"transformer-engine=={version}\ntransformer-engine-cu13=={version}")
    else:
        print(requirement)
print(*NEEDED_BY_APART, *NVCC, sep="\n")
PY
}

# _merge REPORT REPORT: the lock file.
_merge() {
    "$WORK/3.12/bin/python" - "$ROOT/setup.py" "$@" <<'PY'
import json
import re
import runpy
import sys
from types import SimpleNamespace

HEADER = """\
# The GPU stack, every package pinned; Python 3.11 and 3.12, x86_64 Linux with glibc 2.31 or newer, CUDA 13.
# Written by requirements/lock_gpu.sh, installed with --no-deps by `setup_env.sh gpu`; has not run on a GPU yet.
# deepspeed and transformer-engine-torch are phases of their own there. Not here: pip, setuptools and wheel, which
# build.lock pins (vLLM's bound on setuptools is that of its build: it imports neither setuptools nor pkg_resources);
# flash-attn and bitsandbytes, which openrlhf asks for and which nothing imports."""
PINNED_ELSEWHERE = {"pip", "setuptools", "wheel"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def versions(report):
    with open(report) as file:
        found = json.load(file)["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in found}


def apart():
    arguments = {}
    sys.modules["setuptools"] = SimpleNamespace(find_packages=lambda **_: [], setup=arguments.update)
    runpy.run_path(sys.argv[1])
    pins = dict(requirement.split("==") for requirement in arguments["extras_require"]["gpu"])
    pins["transformer-engine-torch"] = pins["transformer-engine[core_cu13,pytorch]"]
    names = ("openrlhf", "deepspeed", "pylatexenc", "megatron-core", "transformer-engine-torch")
    return {name: pins[name] for name in names}


reports = {"3.11": versions(sys.argv[2]), "3.12": versions(sys.argv[3])}
for python, found in reports.items():
    found.update(apart())
    builds = [f"{name}=={version}" for name, version in found.items() if "+" in version]
    if builds:
        sys.exit(
            f"lock: for Python {python} pip found builds of a local index ({', '.join(builds)}), which other machines "
            "do not have: take its find-links and extra indexes away (PIP_CONFIG_FILE=/dev/null, unset PIP_FIND_LINKS)"
        )
print(HEADER)
for name in sorted(set().union(*reports.values()) - PINNED_ELSEWHERE):
    of = {python: found[name] for python, found in reports.items() if name in found}
    if len(of) == len(reports) and len(set(of.values())) == 1:
        print(f"{name}=={of['3.11']}")
    else:
        for python, version in of.items():
            print(f'{name}=={version}; python_version == "{python}"')
PY
}

_die() {
    echo "lock: $*" >&2
    exit 1
}

main

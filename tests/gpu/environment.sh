# shellcheck shell=bash
# What the commands for a GPU machine have in common, for `source`: after it $python is an interpreter that can run them,
# with the checkout, and the bundle that the arguments name, on its path. Nothing is installed or fetched.

COMMAND="${0#"$PWD"/}"
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"

_fail() {
    echo "$COMMAND: $1" >&2
    exit 1
}

_find_python() {
    if [[ -n "${PYTHON:-}" ]]; then
        echo "$PYTHON"
    elif [[ -x "$ROOT/.venv/bin/python" ]]; then
        echo "$ROOT/.venv/bin/python"
    else
        command -v python3 || _fail "there is no .venv in the checkout and no python3: PYTHON=/path/to/python names one"
    fi
}

_bundle() {
    while (($# > 0)); do
        case "$1" in
        --bundle) echo "${2:-}" && return ;;
        --bundle=*) echo "${1#--bundle=}" && return ;;
        esac
        shift
    done
}

python="$(_find_python)"
bundle="$(_bundle "$@")"

export PYTHONPATH="$ROOT${bundle:+:$(cd "$bundle" && pwd)/site}${PYTHONPATH:+:$PYTHONPATH}"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 WANDB_MODE=disabled TOKENIZERS_PARALLELISM=false
export PYTHONUNBUFFERED=1
# one thread for each process: those of a check share the cores
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# the head needs fp32 sums of bf16 products (torch.addmm with out_dtype), the plain layers variable-length attention
COMMAND="$COMMAND" "$python" - <<'CHECK' || exit 1
import os
import sys

command = os.environ["COMMAND"]
if sys.version_info[:2] not in ((3, 11), (3, 12)):
    sys.exit(f"{command}: Python must be 3.11 or 3.12, {sys.executable} is {sys.version.split()[0]}; set PYTHON")
try:
    import torch
except ImportError as error:
    sys.exit(f"{command}: {sys.executable} cannot import torch ({error}); PYTHON=/path/to/python names another")
if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11):
    sys.exit(f"{command}: torch must be 2.11 or newer, {sys.executable} has {torch.__version__}; set PYTHON")
CHECK
# installed, the package has the folder patches/ of the checkout as a part (setup.py); here it need not be installed
if ! (cd "$ROOT" && "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("openrlhf_ext.patches") is None)'); then
    ln -sfn ../patches "$ROOT/openrlhf_ext/patches"
fi

#!/usr/bin/env bash
# The checks that meet a GPU; on a machine without one they run small, on the CPU. Nothing is installed or fetched.
#   bash tests/gpu/run.sh [--call 0|1|2|3|4|5|6] [--minutes 8] [--output FILE] [--bundle FOLDER] [--only NAME]
#       [--skip-passed EARLIER_FILE]
# PYTHON names the interpreter; otherwise it is the checkout's .venv, or a python3.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
exec "$python" -m tests.gpu.start tests.gpu.run "$@"

#!/usr/bin/env bash
# FP8 on this machine: te.Linear against our emulation, matrix products of a 32B model, eight of its layers.
#
#   bash examples/scripts/fp8_study.sh [--bundle DIR] [--minutes N] [--out DIR] [STUDY.yaml]
#
# On a GPU it takes megatron-core and TransformerEngine from the bundle that tests/gpu/bundle.sh made, offline, and builds
# TransformerEngine's extension there (nvcc, g++); the interpreter must have torch 2.11 or newer. Without a GPU it sweeps
# tiny shapes with emulated FP8 in two minutes, and says so. The same command goes on where the last one ended.
# PYTHON names the interpreter; otherwise it is the checkout's .venv, or a python3.
#
# Results: study.json and study.md in DIR (default: build/fp8_study in the checkout). --render makes the
# page again from study.json, on any machine. Options of a study: benchmarks/fp8_study/gpu.yaml.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/../../tests/gpu/environment.sh"
exec "$python" -m tests.gpu.start benchmarks.fp8_study.run "$@"

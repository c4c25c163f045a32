#!/usr/bin/env bash
# What has to be carried, besides the checkout, to a GPU machine without a network (tests/gpu/bundle.py says what).
#
#   bash tests/gpu/bundle.sh [FOLDER] [--whole] [--python 3.12] [--torch 2.11.0+cu130]
#
# Needs a package index, 2 GB of disk for some minutes, and the project's environment (PYTHON names another one's Python).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec "${PYTHON:-.venv/bin/python}" -m tests.gpu.bundle "$@"

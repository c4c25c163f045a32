#!/usr/bin/env bash
# CUDA's hardware queues of a process with a policy rank, for `source`: by ray_node.sh on every node of a cluster, and by
# tests/gpu, so that what is measured there is what clusters have. What you set wins. Engines set their own
# (rollout/launch.py).
set -euo pipefail

# Megatron's advice for tensor parallelism before Blackwell: communication is launched in the order of the program
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# That variable counts compute queues and copy queues, and with one copy queue a block of Adam's states on its way to host
# memory stands before the next one on its way in (ds.adam_offload). This one counts copy queues alone.
export CUDA_DEVICE_MAX_COPY_CONNECTIONS="${CUDA_DEVICE_MAX_COPY_CONNECTIONS:-8}"

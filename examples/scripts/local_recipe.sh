#!/usr/bin/env bash
# Rehearses a cluster on this machine: several Ray nodes under loopback addresses, with the words and the ways of the
# real one. For CPUs; the GPUs of one machine are train_recipe.sh's.
#
#   bash examples/scripts/local_recipe.sh NODES RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# NODES is how many. Each has NODE_GPUS (default here: 1) processes; node N is 127.0.0.N. Other words: launch.sh.

set -euo pipefail

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
[[ ${1:-} =~ ^[1-9][0-9]?$ ]] || usage
export NODE_GPUS=${NODE_GPUS:-1}
ray_address=
mapfile -t nodes < <(seq -f '127.0.0.%g' "$1") # Ray takes each address for a machine
on_node() { "${@:2}"; }
launch "${@:2}"

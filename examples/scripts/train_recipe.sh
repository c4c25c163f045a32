#!/usr/bin/env bash
# Trains on this node alone, or, with RAY_ADDRESS, on the Ray cluster that it names and that this node is a part of.
#
#   bash examples/scripts/train_recipe.sh RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# Words and variables: launch.sh. docs/cluster.md leads from empty nodes to a running job.

set -euo pipefail

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
ray_address=${RAY_ADDRESS:-}
nodes=("$(hostname)")
on_node() { "${@:2}"; }
launch "$@"

#!/usr/bin/env bash
# Trains on hosts that ssh reaches without asking: Ray on each of them, the driver on the first one.
#
#   bash examples/scripts/ssh_recipe.sh HOSTS RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# HOSTS is a file of host names or addresses, one a line; what follows a # is a comment. All hosts see the checkout and
# the folder that this is started in under the same name. Other words and variables: launch.sh.

set -euo pipefail

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
ray_address=
[[ -f ${1:-} ]] || usage
mapfile -t nodes < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' "$1")
((${#nodes[@]})) || { say "$1 names no host" && exit 2; }
# a host that does not answer ends its own ssh, and with it its node
on_node() {
    ssh -o BatchMode=yes -o ConnectTimeout=20 -o ServerAliveInterval=15 -o ServerAliveCountMax=4 "$1" \
        "$(printf '%q ' "${@:2}")"
}
launch "${@:2}"

#!/usr/bin/env bash
# Trains on a Ray cluster that is there already, as a job of its own: `ray job submit` to its dashboard.
#
#   bash examples/scripts/submit_recipe.sh URL RECIPE MODEL DATA REWARD [--entity.name value ...]
#
# URL is that of the dashboard, http://HEAD:8265. The cluster's nodes see the checkout and the folder that this is
# started in under the same name. Ctrl-C stops the job. Other words and variables: launch.sh, whose checks and restarts
# run on the head (train_recipe.sh).

set -euo pipefail

# shellcheck source=examples/scripts/launch.sh
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
[[ ${1:-} == http* ]] || usage
url=$1
read_words "${@:2}"
check_words
job=openrlhf_ext_$(date +%Y%m%d_%H%M%S)_$$
trap '"${python%python}ray" job stop --address "$url" --no-wait "$job" || true; exit 130' INT TERM HUP
# RAY_ADDRESS and the token (RAY_AUTH_*) are what a job has from its node; the driver's environment for its workers counts
# more than the job's, which Ray takes for a conflict otherwise (ray 2.60, RAY_OVERRIDE_JOB_RUNTIME_ENV)
settings=$(environment "FORWARD=${FORWARD:-}" "DRIVER_RESTARTS=${DRIVER_RESTARTS:-3}" RAY_OVERRIDE_JOB_RUNTIME_ENV=1 |
    "$python" -c 'import json, sys
records = [record.partition("=") for record in sys.stdin.read().split("\0") if record]
env = {name: value for name, _, value in records if value and not name.startswith(("RAY_ADDRESS", "RAY_AUTH_"))}
print(json.dumps({"env_vars": env}))')
# Ray's words go through /bin/sh between double quotes (ray 2.60 dashboard/modules/job/cli.py, list2cmdline)
command=$(realpath "$run_folder")/logs/$job.sh
(
    umask 077 # a word may be a key
    printf 'cd %q && exec bash %q' "$PWD" "$ROOT/examples/scripts/train_recipe.sh" >"$command"
    printf ' %q' "${training[@]}" >>"$command"
)
# a file that is none: `ps` shows words
"${python%python}ray" job submit --address "$url" --submission-id "$job" --runtime-env <(printf %s "$settings") -- \
    bash "$command" &
wait $!

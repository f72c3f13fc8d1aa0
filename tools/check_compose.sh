#!/usr/bin/env bash
# Have Compose itself read docker-compose.yml, alone and with each file that goes on top: tools/check_compose.sh
# No engine is needed. Compose is the one on this machine, or comes out of a package of Debian 13; where neither is to be had, the
# check is skipped with the reason.
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${XDG_CACHE_HOME:-$HOME/.cache}/headway/compose
plugin() { find "$cache" -path '*/cli-plugins/docker-compose' 2>/dev/null || true; }
if docker compose version >/dev/null 2>&1; then
  compose=(docker compose)
else
  if [[ -z $(plugin) ]] && ! told=$(tools/debian.sh trixie "$cache" docker-compose 2>&1); then
    echo "skipped: there is no Docker Compose, and it cannot be fetched: ${told##*$'\n'}"
    exit 0
  fi
  compose=("$(plugin)")
fi
echo "Compose $("${compose[@]}" version --short)"
for above in "" docker-compose.*.yml; do
  "${compose[@]}" --env-file /dev/null -f docker-compose.yml ${above:+-f "$above"} config --quiet
  echo "docker-compose.yml ${above:+with $above }is well"
done

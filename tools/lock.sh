#!/usr/bin/env bash
# Resolve pyproject.toml in a fresh environment and write requirements.lock.
#   TORCH: the torch release that the lock pins
set -euo pipefail
cd "$(dirname "$0")/.."
torch=${TORCH:-2.13.0}
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet --upgrade pip
"$environment/bin/pip" install --quiet "torch==$torch"
"$environment/bin/pip" install --quiet ".[local,dev,container]"
{
  echo "# Written by tools/lock.sh: what pyproject.toml's extras [local,dev,container] resolved to."
  "$environment/bin/pip" freeze --exclude headway | sed 's/^\(torch==[0-9.]*\)+.*/\1/'
} >requirements.lock

#!/bin/sh
# Install the dependencies of extras of pyproject.toml into /opt/headway, in the versions of requirements.lock.
#   install.sh [EXTRA...]        no extra: what every service needs
# With wheels in /wheels nothing is fetched; else they come from the package index (TORCH_INDEX: a further one, for torch
# without CUDA). A certificate in /run/secrets/ca is trusted, for networks that have one of their own.
set -eu
here=$(dirname "$0")
[ -s /run/secrets/ca ] && export PIP_CERT=/run/secrets/ca
if ls /wheels/*.whl >/dev/null 2>&1; then
  source="--no-index --find-links /wheels"
else
  source="${TORCH_INDEX:+--extra-index-url $TORCH_INDEX}"
fi
python3 "$here/requirements.py" "$here/pyproject.toml" "$@" >/tmp/requirements.txt
# shellcheck disable=SC2086  # $source is words
pip --no-cache-dir --disable-pip-version-check --python /opt/headway/bin/python \
  install --quiet $source --constraint "$here/requirements.lock" --requirement /tmp/requirements.txt
rm /tmp/requirements.txt

#!/bin/sh
# Install bubblewrap: from a package beside the wheels, else from Debian. Without it no reward runs code, and says so.
set -eu
if ls /wheels/bubblewrap_*.deb >/dev/null 2>&1; then
  dpkg --install /wheels/bubblewrap_*.deb >/dev/null
elif ls /wheels/*.whl >/dev/null 2>&1; then
  echo "no bubblewrap beside the wheels: rewards will not run code"
else
  apt-get -qq update
  apt-get -qq install --yes --no-install-recommends bubblewrap >/dev/null
  rm -rf /var/lib/apt/lists/*
fi

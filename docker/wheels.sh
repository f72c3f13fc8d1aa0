#!/usr/bin/env bash
# Fill docker/wheels, on a machine that reaches a package index, so that images are built on one that does not.
#   docker/wheels.sh [PYTHON]       PYTHON: of the version in the images (3.11), default python3
# Other folders: WHEELS=DIR. Model-written code in rewards needs bubblewrap: its package is fetched where apt-get is.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
wheels=$(realpath "${WHEELS:-docker/wheels}")
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11) and "the images have Python 3.11: give one")'
"$python" -m pip wheel --quiet --wheel-dir "$wheels" --requirement requirements.lock "dumb-init>=1.2.5" "setuptools>=77"
if command -v apt-get >/dev/null; then
  (cd "$wheels" && apt-get -qq download bubblewrap) || echo "no bubblewrap: rewards will not run code"
fi
du -sh "$wheels"

#!/usr/bin/env bash
# setup.sh [FOLDER]: an environment of its own for real SGLang on CPU (1.8 GB, 2-3 minutes)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-.venv-sglang}
done=$folder/.ready
if [[ -f $done && $done -nt $here/requirements.txt ]]; then exit 0; fi
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.13.0
"$folder/bin/pip" install --quiet --no-deps sglang==0.5.23 xgrammar==0.2.7
"$folder/bin/pip" install --quiet --requirement "$here/requirements.txt" # its warnings about conflicts are harmless
touch "$done"

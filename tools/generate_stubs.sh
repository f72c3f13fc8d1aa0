#!/usr/bin/env bash
# Generate headway/v1 from protos/. `--check` writes nothing and fails when the committed stubs are not current.
set -euo pipefail
cd "$(dirname "$0")/.."
out=.
if [[ ${1:-} == --check ]]; then
  out=$(mktemp -d)
  trap 'rm -rf "$out"' EXIT
fi
python -m grpc_tools.protoc -I protos --python_out="$out" --mypy_out="quiet:$out" --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" \
  protos/headway/v1/*.proto
[[ $out == . ]] || diff -r -x __pycache__ -x __init__.py "$out/headway/v1" headway/v1

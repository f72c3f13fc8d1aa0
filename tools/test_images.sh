#!/usr/bin/env bash
# Build the images with the Docker engine that is reachable, and show that they keep the contract of docker/Dockerfile.
#   tools/test_images.sh [BAKE_TARGET...]      default: cpu inference-sglang trainer-cuda, as far as their bases are there
# Skipped, with the reason, where no engine is reachable.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=${HEADWAY_IMAGE_PREFIX:-headway} tag=${HEADWAY_TAG:-0.1.0}
if ! reason=$(docker version --format '{{.Server.Version}}' 2>&1); then
  echo "skipped: no Docker engine is reachable: ${reason##*$'\n'}"
  exit 0
fi
say() { printf '%(%H:%M:%S)T %s\n' -1 "$*"; }
fail() { say "FAILED: $*"; exit 1; }
image() { echo "$prefix/$1:$tag"; }
inside() { docker run --rm --entrypoint sh "$(image "$1")" -c "$2"; }

say "Docker $reason"
targets=("$@")
if [[ ${#targets[@]} == 0 ]]; then
  targets=(cpu)
  docker image inspect "${SGLANG_IMAGE:-lmsysorg/sglang:v0.5.23}" >/dev/null 2>&1 && targets+=(inference-sglang) ||
    say "skipped: inference-sglang, because SGLang's image is not on this machine (docker pull it, or give SGLANG_IMAGE)"
  if ls "${HEADWAY_WHEELS:-docker/wheels}"/*.whl >/dev/null 2>&1 && [[ -z ${HEADWAY_WHEELS_CUDA:-} ]]; then
    say "skipped: trainer-cuda, because the wheels are for CPUs (HEADWAY_WHEELS_CUDA names others)"
  else
    targets+=(trainer-cuda)
  fi
fi
started=$SECONDS
docker buildx bake --progress=quiet "${targets[@]}"
say "built ${targets[*]} in $((SECONDS - started)) s"

built() { docker image inspect "$(image "$1")" >/dev/null 2>&1; }
for name in name-resolve reward rollout-controller inference trainer test inference-sglang trainer-cuda; do
  built "$name" || continue
  [[ $(inside "$name" 'id -u') == 10001 ]] || fail "$name does not run as 10001"
  if [[ $name != inference-sglang ]]; then # its base is not ours
    [[ -z $(inside "$name" 'command -v gcc cc g++ clang || true') ]] || fail "$name has a compiler"
  fi
  say "$name: $(docker image inspect --format '{{.Size}}' "$(image "$name")" | awk '{printf "%.0f MB", $1 / 1e6}'), user 10001, no compiler"
done
for name in name-resolve reward rollout-controller; do
  inside "$name" 'python -c "import torch"' 2>/dev/null && fail "$name has torch"
done
say "no torch in name-resolve, reward, rollout-controller"

# What needs no partner is started with a read-only root and without capabilities, probed, and ended as PID 1.
for name in name-resolve reward; do
  container=$(docker run --detach --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
    --volume "$PWD/configs:/headway/configs:ro" --env HEADWAY_CONFIG=configs/quickstart.yaml \
    "$(image "$name")" cluster.name_resolve.type=memory)
  for _ in $(seq 120); do
    health=$(docker inspect --format '{{.State.Health.Status}}' "$container")
    [[ $health == starting ]] || break
    sleep 0.5
  done
  [[ $health == healthy ]] || { docker logs "$container"; docker rm --force "$container" >/dev/null; fail "$name is $health"; }
  before=$(date +%s%N)
  docker stop --time 10 "$container" >/dev/null
  took_ms=$((($(date +%s%N) - before) / 1000000))
  code=$(docker inspect --format '{{.State.ExitCode}}' "$container")
  docker rm "$container" >/dev/null
  [[ $code == 0 ]] || fail "$name ended with $code after SIGTERM"
  say "$name: healthy with a read-only root; SIGTERM to exit 0 in $took_ms ms"
done

code=0
told=$(docker run --rm "$(image reward)" --config configs/none.yaml 2>&1) || code=$?
[[ $code == 2 && $(wc -l <<<"$told") == 1 ]] || fail "a missing experiment file: exit $code: $told"
say "a missing experiment file: exit 2: $told"
say "passed"

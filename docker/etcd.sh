#!/usr/bin/env bash
# Make an etcd image from etcd's programs, for machines without a registry; name it in ETCD_IMAGE.
#   docker/etcd.sh TAG FOLDER       FOLDER has etcd and etcdctl, 3.5.16 or newer
set -euo pipefail
tag=$1 folder=$2
docker build --quiet --tag "$tag" --file - "$folder" <<DOCKERFILE
FROM ${PYTHON_IMAGE:-python:3.11-slim-bookworm}
COPY etcd etcdctl /usr/local/bin/
ENTRYPOINT []
CMD ["/usr/local/bin/etcd"]
DOCKERFILE

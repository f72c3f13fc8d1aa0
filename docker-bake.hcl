// All images: `docker buildx bake`. One of them: `docker buildx bake reward`. On a machine with GPUs: `docker buildx bake gpu`.

variable "HEADWAY_IMAGE_PREFIX" { default = "headway" }
variable "HEADWAY_TAG" { default = "0.1.0" }
variable "PYTHON_IMAGE" { default = "python:3.11-slim-bookworm" }
variable "PYTHON_DIGEST" { default = "" }
variable "TORCH_INDEX" { default = "" }
variable "SGLANG_IMAGE" { default = "lmsysorg/sglang:v0.5.23" }
// Wheels (docker/wheels.sh): where there are some, no package index is asked. The other folder holds torch with CUDA.
variable "HEADWAY_WHEELS" { default = "docker/wheels" }
variable "HEADWAY_WHEELS_CUDA" { default = "docker/wheels" }

group "default" { targets = ["cpu", "gpu"] }
group "cpu" { targets = ["name-resolve", "reward", "rollout-controller", "inference", "trainer", "test"] }
group "gpu" { targets = ["inference-sglang", "trainer-cuda"] }

target "image" {
  context    = "."
  dockerfile = "docker/Dockerfile"
  contexts   = { wheels = HEADWAY_WHEELS }
  args = {
    PYTHON_IMAGE  = PYTHON_IMAGE
    PYTHON_DIGEST = PYTHON_DIGEST
    SGLANG_IMAGE  = SGLANG_IMAGE
  }
}

target "service" {
  inherits = ["image"]
  name     = service
  matrix = {
    service = ["name-resolve", "reward", "rollout-controller", "inference", "trainer", "test", "inference-sglang", "trainer-cuda"]
  }
  target   = service
  args     = { TORCH_INDEX = service == "trainer-cuda" ? "" : TORCH_INDEX }
  contexts = { wheels = service == "trainer-cuda" ? HEADWAY_WHEELS_CUDA : HEADWAY_WHEELS }
  tags     = ["${HEADWAY_IMAGE_PREFIX}/${service}:${HEADWAY_TAG}"]
}

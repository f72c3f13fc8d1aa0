"""Ask a service whether it serves: what the health check of a container runs.

    python -m headway.runtime.probe HOST:PORT      the gRPC health protocol
    python -m headway.runtime.probe URL            an HTTP answer of 200

    exit 0  it serves      exit 1  it does not; one line says what came back

HTTP is asked under the name localhost, as a health check is part of the machine it checks, and with the token of
HEADWAY_API_TOKEN where there is one. No program beside Python is needed in the image.
"""

import os
import sys
import urllib.error
import urllib.request

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def probe(target: str, timeout_s: float = TIMEOUT_S) -> str:
    """What is wrong with a service; empty: it serves."""
    if "://" in target:
        return _probe_http(target, timeout_s)
    return _probe_grpc(target, timeout_s)


def _probe_grpc(address: str, timeout_s: float) -> str:
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else status


def _probe_http(url: str, timeout_s: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers={"Host": "localhost"})
    if token := os.environ.get("HEADWAY_API_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with opener.open(request, timeout=timeout_s) as answer:
            return "" if answer.status == 200 else f"HTTP {answer.status}"
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except OSError as error:
        return str(getattr(error, "reason", error))


def main(argv: list[str]) -> int:
    """The command: one target, an exit code."""
    if len(argv) != 1:
        print("usage: python -m headway.runtime.probe HOST:PORT | URL", file=sys.stderr)
        return 2
    problem = probe(argv[0])
    if problem:
        print(f"{argv[0]} does not serve: {problem}", file=sys.stderr)
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

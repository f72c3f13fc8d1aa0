"""Score one row in a process of its own: `python -m headway.config.reward_probe`, JSON on stdin, JSON on stdout.

A user's reward function may hang or bring the process down: whoever asks sets a time limit.
"""

import sys

import orjson

from headway.errors import HeadwayError
from headway.reward import Evaluator, Sample


def main() -> None:
    """Answer `{function, kwargs, row, prompt, completions}` with an outcome for each completion."""
    request = orjson.loads(sys.stdin.buffer.read())
    try:
        evaluator = Evaluator(request["function"], request["kwargs"])
        samples = [Sample(completion, request["prompt"], request["row"]) for completion in request["completions"]]
        told = [{"status": o.status, "reward": o.reward, "message": o.message} for o in map(evaluator.run, samples)]
    except HeadwayError as error:
        told = [{"status": "error", "reward": 0.0, "message": str(error)}]
    sys.stdout.buffer.write(b"\n" + orjson.dumps(told) + b"\n")


if __name__ == "__main__":
    main()

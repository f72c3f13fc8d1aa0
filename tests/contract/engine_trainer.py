"""A trainer's half of a weights update over gloo: `python engine_trainer.py FILE GROUP [flattened_bucket]`.

Prints the port of its store, joins the group as rank 0, prints "joined", waits for a line, and broadcasts the tensors
of the safetensors file in their order.
"""

import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d


def main(file: str, name: str, load_format: str) -> None:
    c10d: Any = distributed_c10d
    timeout = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", 0, 2, True, timeout, wait_for_workers=False)
    print(store.port, flush=True)
    prefixed = dist.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=timeout
    )
    print("joined", flush=True)
    sys.stdin.readline()
    tensors = list(load_file(file).values())
    if load_format == "flattened_bucket":
        tensors = [torch.cat([tensor.flatten().view(torch.uint8) for tensor in tensors])]
    for tensor in tensors:
        group.broadcast(tensor, 0).wait()
    sys.stdin.readline()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "")

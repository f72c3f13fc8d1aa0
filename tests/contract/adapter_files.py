"""Adapters in peft's files for the contract suite's models, and what transformers makes of them."""

import hashlib
import json
import warnings
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, model: Path, seed: int, targets: tuple[str, ...] = TARGETS) -> Path:
    """An adapter with random matrices that change the model clearly."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, module in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape
            place = f"base_model.model.{name}"
            tensors[f"{place}.lora_A.weight"] = 0.2 * torch.randn(RANK, inputs, generator=generator)
            tensors[f"{place}.lora_B.weight"] = 0.05 * torch.randn(outputs, RANK, generator=generator)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": list(targets), "base_model_name_or_path": str(model), "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def write_manifest(folder: Path, **head: object) -> str:
    """The manifest of all files in a folder; returns its sha256."""
    files = [
        {"name": file.name, "bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        for file in sorted(folder.iterdir())
    ]
    data = json.dumps({**head, "files": files}).encode()
    (folder / "manifest.json").write_bytes(data)
    return hashlib.sha256(data).hexdigest()


def logprobs_with(model: Path, adapter: Path | None, ids: list[int]) -> np.ndarray:
    """[L - 1] log-probability of each token but the first, by transformers and peft in float32."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # peft asks transformers in its old words
            lm = PeftModel.from_pretrained(lm, adapter)
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0, :-1]
    chosen: np.ndarray = torch.log_softmax(logits, -1)[range(len(ids) - 1), ids[1:]].numpy()
    return chosen

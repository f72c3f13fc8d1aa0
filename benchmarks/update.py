"""One GRPO update (old log-probs, loss, backward, clip, step) on a ragged batch: this engine, plain transformers, TRL.

    python -m benchmarks.update speed  [--model tiny smol] [--threads 1] [--rounds 3]
    python -m benchmarks.update memory [--tokens 32768] [--vocabulary 50000]

`speed` gives all of them the same model, samples, advantages and old log-probs, and prints the loss and the norm of the
gradient, which must agree, beside the time. The floor is the arithmetic of every token of every sample once, at the
rate that a float32 matrix product reaches here; sharing the rows of a group's prompt goes below it. TRL takes part
where it is installed (`pip install trl`).

`memory` is the peak of one update in a process of its own, with and without the logits of all tokens in memory.
"""

import argparse
import importlib.util
import multiprocessing
import resource
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, LlamaConfig

from headway.algorithm.batch import SampleBatch
from headway.algorithm.products import product
from headway.config import ExperimentConfig
from headway.core.trajectory import Group, Trajectory
from services.trainer.engine import TrainEngine

LR, CLIP = 1e-5, 0.2


@dataclass(frozen=True)
class Case:
    """A model, and the shape of its batch."""

    model: dict[str, Any]
    num_groups: int
    per_group: int
    prompt: tuple[int, int]
    """Shortest and longest."""
    completion: tuple[int, int]


CASES = {
    "tiny": Case(
        {
            "vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
            "num_attention_heads": 4,
        },
        num_groups=64, per_group=8, prompt=(10, 16), completion=(7, 10),
    ),
    "smol": Case(
        {
            "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
            "num_attention_heads": 9, "num_key_value_heads": 3,
        },
        num_groups=8, per_group=8, prompt=(30, 45), completion=(4, 16),
    ),
}  # fmt: skip
"""`tiny` is the quickstart's; `smol` has the shape of SmolLM2-135M, with random weights."""


class Updater(Protocol):
    """One of the competitors."""

    def logp(self) -> Tensor:
        """[T] log-probs of the tokens in the loss, without gradient."""

    def update(self, old: Tensor, advantages: Tensor) -> tuple[float, float]:
        """Train on the batch; loss and norm of the gradient."""


class Headway:
    """This engine, plain PPO, one optimizer step."""

    def __init__(self, folder: Path, batch: SampleBatch, budget: int | None = 4096) -> None:
        actor = {
            "path": str(folder), "init_from_scratch": True, "dtype": "float32", "ppo_n_minibatches": 1,
            "recompute_logprob": True, "eps_clip": CLIP, "mb_spec": {"max_tokens_per_mb": budget},
            "optimizer": {"lr": LR, "weight_decay": 0.0, "gradient_clipping": 1.0},
        }  # fmt: skip
        self.engine = TrainEngine(ExperimentConfig.model_validate({"actor": actor}), total_train_steps=1000)
        self.batch = batch

    def logp(self) -> Tensor:
        return self.engine.compute_logp(self.batch)

    def update(self, old: Tensor, advantages: Tensor) -> tuple[float, float]:
        stats = self.engine.ppo_update(self.batch.with_(prox_logp=old, advantages=advantages)).stats
        return stats["ppo_actor/update/actor_loss/avg"], stats["ppo_actor/update/grad_norm"]


class Plain:
    """transformers as one writes it down: the batch padded on the right, logits of all completions, AdamW."""

    def __init__(self, folder: Path, batch: SampleBatch) -> None:
        self.model = reference_model(folder)
        self.batch, self.ids = batch, padded(batch, batch.input_ids)
        self.mask, self.attention = (
            padded(batch, batch.loss_mask)[:, 1:],
            padded(batch, torch.ones(batch.num_tokens).long()),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)

    def _scores(self) -> Tensor:
        """[N, L - 1]."""
        keep = int(self.mask.any(0).nonzero()[0])
        logits = self.model(
            input_ids=self.ids, attention_mask=self.attention, use_cache=False, logits_to_keep=self.ids.shape[1] - keep
        ).logits[:, :-1]
        found = logits.log_softmax(-1).gather(-1, self.ids[:, keep + 1 :, None]).squeeze(-1)
        return torch.nn.functional.pad(found, (keep, 0))

    def logp(self) -> Tensor:
        with torch.no_grad():
            return flat(self.batch, self._scores() * self.mask)

    def update(self, old: Tensor, advantages: Tensor) -> tuple[float, float]:
        old, advantages = (padded(self.batch, x)[:, 1:] for x in (old, advantages))
        ratio = (self._scores() - old).exp()
        losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - CLIP, 1 + CLIP))
        loss = losses[self.mask].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)


class Trl:
    """GRPOTrainer's own loss and training step, on prepared inputs."""

    def __init__(self, folder: Path, batch: SampleBatch) -> None:
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        self.batch = batch
        prompts, completions = split_samples(batch)
        config = GRPOConfig(
            output_dir=str(folder / "trl"), use_cpu=True, bf16=False, gradient_checkpointing=False, beta=0.0,
            per_device_train_batch_size=batch.num_samples, num_generations=8, learning_rate=LR, weight_decay=0.0,
            max_grad_norm=1.0, loss_type="dapo", report_to="none", disable_tqdm=True, epsilon=CLIP,
            lr_scheduler_type="constant",
        )  # fmt: skip
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters(), pad_token="0", eos_token="1")
        data = Dataset.from_list([{"prompt": "2"}] * batch.num_samples)
        self.trainer = GRPOTrainer(
            model=reference_model(folder), processing_class=tokenizer, args=config, train_dataset=data,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )  # fmt: skip
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = 1
        self.trainer.model.train()
        left = [pad_sequence([x.flip(0) for x in prompts], batch_first=True).flip(1)]
        left.append(pad_sequence([torch.ones_like(x) for x in prompts], batch_first=True).flip(1))
        lengths = torch.tensor([len(x) for x in prompts])
        left[1] = (torch.arange(left[0].shape[1]) >= left[0].shape[1] - lengths[:, None]).long()
        self.inputs: dict[str, Any] = {
            "prompt_ids": left[0], "prompt_mask": left[1],
            "completion_ids": pad_sequence(completions, batch_first=True),
            "completion_mask": pad_sequence([torch.ones_like(x) for x in completions], batch_first=True),
            "num_items_in_batch": batch.loss_mask.sum(),
        }  # fmt: skip

    def logp(self) -> Tensor:
        keep = self.inputs["completion_ids"].shape[1]
        with torch.no_grad():
            found, _, _ = self.trainer._get_per_token_logps_and_entropies(
                self.trainer.model,
                torch.cat([self.inputs["prompt_ids"], self.inputs["completion_ids"]], 1),
                torch.cat([self.inputs["prompt_mask"], self.inputs["completion_mask"]], 1),
                keep,
            )
        return torch.zeros(self.batch.num_tokens).masked_scatter(
            self.batch.loss_mask, found[self.inputs["completion_mask"].bool()]
        )

    def update(self, old: Tensor, advantages: Tensor) -> tuple[float, float]:
        parts = [
            x[self.batch.loss_mask].split(self.inputs["completion_mask"].sum(1).tolist()) for x in (old, advantages)
        ]
        old_padded, advantages_padded = (pad_sequence(list(part), batch_first=True) for part in parts)
        inputs = self.inputs | {"old_per_token_logps": old_padded, "advantages": advantages_padded}
        self.trainer._prepare_inputs = lambda _: inputs
        loss = self.trainer.training_step(self.trainer.model, inputs, None)
        norm = torch.nn.utils.clip_grad_norm_(self.trainer.model.parameters(), 1.0)
        self.trainer.optimizer.step()
        self.trainer.optimizer.zero_grad()
        return float(loss), float(norm)


def speed(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(arguments.threads)
    rate = matrix_rate()
    print(f"{arguments.threads} thread(s), matrix product {rate / 1e9:.0f} GFLOP/s in float32")
    competitors: dict[str, Callable[[Path, SampleBatch], Updater]] = {"headway": Headway, "transformers": Plain}
    if importlib.util.find_spec("trl") is not None:
        competitors["TRL"] = Trl
    for name in arguments.model:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            write_config(case, Path(folder))
            batch = make_batch(case)
            floor = arithmetic(reference_model(Path(folder)), batch) / rate
            print(f"\n{name}: {batch.num_samples} samples, {batch.num_tokens} tokens, floor {floor:.3f} s")
            for label, build in competitors.items():
                report(label, build(Path(folder), batch), batch, floor, arguments.rounds)


def report(label: str, updater: Updater, batch: SampleBatch, floor: float, rounds: int) -> None:
    """Print one line: the first update's loss and gradient, and the median time of the others."""
    generator = torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(batch.num_tokens, generator=generator)
    advantages = torch.randn(batch.num_tokens, generator=generator) * batch.loss_mask
    loss, norm = updater.update(updater.logp() + noise, advantages)
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        updater.update(updater.logp() + noise, advantages)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times)
    print(
        f"  {label:14s} {seconds:8.3f} s   {floor / seconds:5.2f} of the floor   loss {loss:.6f}   gradient {norm:.5f}"
    )


def memory(arguments: argparse.Namespace) -> None:
    context = multiprocessing.get_context("spawn")
    peaks = {}
    for name in ("idle", "headway", "all logits"):
        queue = context.Queue()
        process = context.Process(target=peak_of, args=(name, arguments.tokens, arguments.vocabulary, queue))
        process.start()
        peaks[name] = queue.get()
        process.join()
    for name in ("headway", "all logits"):
        update = (peaks[name] - peaks["idle"]) / 2**30
        print(f"{name:12s} peak {peaks[name] / 2**30:6.2f} GiB, of which the update {update:6.2f}")


def peak_of(name: str, tokens: int, vocabulary: int, queue: Any) -> None:
    """The largest resident size of this process after one update, bytes."""
    shape = {"vocab_size": vocabulary, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2,
             "num_attention_heads": 4}  # fmt: skip
    case = Case(shape, num_groups=tokens // 512, per_group=1, prompt=(1, 1), completion=(511, 511))
    with tempfile.TemporaryDirectory() as folder:
        write_config(case, Path(folder))
        batch = make_batch(case)
        updater = Plain(Path(folder), batch) if name == "all logits" else Headway(Path(folder), batch, budget=None)
        if name != "idle":
            updater.update(torch.zeros(batch.num_tokens), torch.ones(batch.num_tokens) * batch.loss_mask)
    queue.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def make_batch(case: Case) -> SampleBatch:
    rng = np.random.default_rng(0)
    groups = []
    for g in range(case.num_groups):
        prompt = rng.integers(3, case.model["vocab_size"], rng.integers(case.prompt[0], case.prompt[1] + 1))
        samples = []
        for _ in range(case.per_group):
            length = rng.integers(case.completion[0], case.completion[1] + 1)
            ids = np.concatenate([prompt, rng.integers(3, case.model["vocab_size"], length)]).astype(np.int32)
            made = np.arange(len(ids)) >= len(prompt)
            samples.append(
                Trajectory(ids, np.zeros(len(ids), np.float32), made, np.where(made, 0, -1).astype(np.int32), 0.0)
            )
        groups.append(Group(str(g), tuple(samples)))
    return SampleBatch.from_groups(groups)


def write_config(case: Case, folder: Path) -> None:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaConfig(**case.model, **special, max_position_embeddings=2048, tie_word_embeddings=True).save_pretrained(folder)


def reference_model(folder: Path) -> Any:
    """The model that the engine makes from scratch with seed 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(LlamaConfig.from_pretrained(folder), dtype=torch.float32)


def arithmetic(model: Any, batch: SampleBatch) -> float:
    """Operations of a pass forward and one forward and backward: each token once, the output layer where needed."""
    head = model.lm_head.weight.numel()
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - head
    return 2 * 4 * (matrices * batch.num_tokens + head * int(batch.loss_mask.sum()))


def matrix_rate() -> float:
    """Operations per second of a product of the size that is met in training, by the faster library."""
    a, b = torch.randn(1024, 576), torch.randn(1536, 576)
    best = 1e9
    for multiply in (product, linear):
        for _ in range(30):
            start = time.perf_counter()
            multiply(a, b)
            best = min(best, time.perf_counter() - start)
    return 2 * 1024 * 576 * 1536 / best


def padded(batch: SampleBatch, x: Tensor) -> Tensor:
    """[N, L], filled up on the right."""
    return pad_sequence(list(x.split(batch.lengths.tolist())), batch_first=True)


def flat(batch: SampleBatch, shifted: Tensor) -> Tensor:
    """[T] from [N, L - 1] whose first column is the second token."""
    rows = torch.nn.functional.pad(shifted, (1, 0))
    return torch.cat([row[:length] for row, length in zip(rows, batch.lengths.tolist(), strict=True)])


def split_samples(batch: SampleBatch) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts and completions."""
    samples = [batch.select([i]) for i in range(batch.num_samples)]
    return [s.input_ids[~s.loss_mask] for s in samples], [s.input_ids[s.loss_mask] for s in samples]


def letters() -> Any:
    """A tokenizer that TRL can hold; nothing is tokenised."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(i): i for i in range(64)}, unk_token="3"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    fast = commands.add_parser("speed")
    fast.add_argument("--model", nargs="+", choices=CASES, default=list(CASES))
    fast.add_argument("--threads", type=int, default=1)
    fast.add_argument("--rounds", type=int, default=3)
    small = commands.add_parser("memory")
    small.add_argument("--tokens", type=int, default=32768)
    small.add_argument("--vocabulary", type=int, default=50000)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    speed(arguments) if arguments.command == "speed" else memory(arguments)


if __name__ == "__main__":
    main()

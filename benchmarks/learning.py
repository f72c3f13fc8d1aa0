"""Wall time to a held-out accuracy on the quickstart's task: `headway up` and TRL's GRPOTrainer, side by side.

    python -m benchmarks.learning [--rounds 2] [--goal 0.75] [--only headway trl]

Both start from the same model (the quickstart's after its warm start, made here by `headway sft`), see the same rows,
and use the same hyper-parameters: 32 prompts of 16 samples a step, four optimizer steps each, the learning rate and its
course, clipping, Adam's betas. Headway's time runs from the evaluation of the initial model to that of the first
version at the goal, everything in between included; TRL's leaves out its evaluations (256 held-out rows at temperature
1, every `EVALUATE_EVERY` steps in both), imports and set-up. TRL takes part where it is installed, on two threads.
"""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from headway.config import ExperimentConfig, load_experiment

QUICKSTART = "configs/quickstart.yaml"
EVALUATE_EVERY = 5
LIMIT_S = 900.0
REACHED = "reached"
"""Begins the line that the other process prints."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--goal", type=float, default=0.75)
    parser.add_argument("--only", nargs="+", choices=("headway", "trl"), default=["headway", "trl"])
    parser.add_argument("--model", type=Path, help="start from this folder")
    parser.add_argument("--as-trl", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_trl:
        train_with_trl(arguments.model, arguments.goal)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or fine_tuned(Path(folder) / "model")
        compare(model, Path(folder), arguments)


def compare(model: Path, folder: Path, arguments: argparse.Namespace) -> None:
    competitors = [name for name in arguments.only if name == "headway" or importlib.util.find_spec("trl") is not None]
    seconds: dict[str, list[float]] = {name: [] for name in competitors}
    for number in range(arguments.rounds):
        for name in competitors:
            run = run_headway if name == "headway" else run_trl
            before = cpu_seconds()
            took, steps = run(model, folder / f"{name}-{number}", arguments.goal)
            seconds[name].append(took)
            text = f"{took:7.1f} s to {arguments.goal:g} in {steps} steps; {cpu_seconds() - before:.0f} s of CPU in all"
            print(f"{name:8s} {text}", flush=True)
    for name, taken in seconds.items():
        print(f"{name:8s} median {statistics.median(taken):7.1f} s")


def cpu_seconds() -> float:
    """Of all processes that have ended, start and evaluations included."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fine_tuned(output: Path) -> Path:
    command = [sys.executable, "-m", "headway", "sft", QUICKSTART, "--output", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return output


def run_headway(model: Path, folder: Path, goal: float) -> tuple[float, int]:
    """Seconds and steps to the goal."""
    settings = {
        "cluster.fileroot": folder, "services.controller_http_port": 0, "warm_start": "null", "actor.path": model,
        "actor.init_from_scratch": "false", "evaluator.freq_steps": EVALUATE_EVERY,
    }  # fmt: skip
    words = [f"{key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "headway", "up", QUICKSTART, *words]
    subprocess.run(command, check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
    (file,) = folder.rglob("stats.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    evaluated = [line for line in lines if "eval/task_reward/avg" in line]
    first = next((line for line in evaluated if line["eval/task_reward/avg"] >= goal), None)
    return (float("inf"), len(lines)) if first is None else (first["time"] - evaluated[0]["time"], first["step"])


def run_trl(model: Path, folder: Path, goal: float) -> tuple[float, int]:
    command = [sys.executable, "-m", "benchmarks.learning", "--as-trl", "--model", str(model), "--goal", str(goal)]
    quiet = os.environ | {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, check=True, timeout=LIMIT_S, env=quiet, stdout=subprocess.PIPE, text=True)
    took, steps = next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith(REACHED))
    return float(took), int(steps)


def train_with_trl(model_folder: Path, goal: float) -> None:
    """Print the seconds and steps that GRPOTrainer takes to the goal, without its evaluations."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    from examples.sort_digits import rows

    torch.set_num_threads(2)
    torch.manual_seed(1)
    config = load_experiment(Path(QUICKSTART), [])
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(model_folder, dtype=torch.float32)

    def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return [float(text.strip() == wanted) for text, wanted in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        """Stops at the goal."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.began, self.evaluating_s = time.monotonic(), 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            step, rest = divmod(state.global_step, config.actor.ppo_n_minibatches)
            if rest or step % EVALUATE_EVERY:
                return control
            now = time.monotonic()
            if accuracy(model, tokenizer, rows("test"), config) >= goal:
                print(REACHED, now - self.began - self.evaluating_s, step, flush=True)
                control.should_training_stop = True
            self.evaluating_s += time.monotonic() - now
            return control

    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, reward_funcs=exact, args=trl_settings(config, folder),
            train_dataset=Dataset.from_list(rows("train")), callbacks=[Clock()],
        )  # fmt: skip
        trainer.train()


def trl_settings(config: ExperimentConfig, folder: str) -> Any:
    """The quickstart's hyper-parameters in TRL's words."""
    from trl import GRPOConfig

    actor, optimizer = config.actor, config.actor.optimizer
    assert optimizer is not None
    samples, updates = config.train_dataset.batch_size * config.gconfig.n_samples, actor.ppo_n_minibatches
    steps = (config.total_train_steps or 0) * updates
    return GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        save_strategy="no", disable_tqdm=True, logging_strategy="no", per_device_train_batch_size=samples // updates,
        steps_per_generation=updates, num_generations=config.gconfig.n_samples, max_steps=steps, beta=0.0,
        max_completion_length=config.gconfig.max_new_tokens, temperature=1.0, top_p=1.0, top_k=0, seed=config.seed,
        learning_rate=optimizer.lr, lr_scheduler_type="linear", warmup_steps=int(0.05 * steps), weight_decay=0.0,
        adam_beta1=optimizer.beta1, adam_beta2=optimizer.beta2, max_grad_norm=optimizer.gradient_clipping,
        epsilon=actor.eps_clip, loss_type="dapo", scale_rewards="group",
    )  # fmt: skip


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], config: ExperimentConfig) -> float:
    """Part of the held-out rows that a sample at temperature 1 answers."""
    import torch

    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True, add_special_tokens=False)
    inputs.pop("token_type_ids", None)
    model.eval()
    with torch.no_grad():
        found = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=config.gconfig.max_new_tokens)
    model.train()
    texts = tokenizer.batch_decode(found[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    num_right: int = sum(text.strip() == row["answer"] for text, row in zip(texts, rows, strict=True))
    return num_right / len(rows)


if __name__ == "__main__":
    main()

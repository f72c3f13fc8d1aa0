"""With `enable_offload` the model leaves the GPU when a step's weights are out, and stays there without."""

from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config import ExperimentConfig
from headway.core.version import PolicyVersion
from services.trainer.phases import Phases
from services.trainer.worker import TorchWorker


class Engine:
    """Rank 1 of a train engine; says whether it was offloaded."""

    rank = 1
    is_offloaded = False

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        self.is_offloaded = False
        return {}

    def state_dict(self) -> dict[str, Any]:
        self.is_offloaded = False
        return {"lr_step": torch.tensor(0)}

    def offload(self) -> None:
        self.is_offloaded = True


@pytest.mark.parametrize("is_wanted", [True, False])
def test_between_steps_the_gpu_is_free_where_that_is_wanted(tmp_path: Path, is_wanted: bool) -> None:
    worker, engine = TorchWorker(ExperimentConfig(enable_offload=is_wanted), Phases()), Engine()
    worker._engine = engine  # type: ignore[assignment]
    worker.write(PolicyVersion(1, 0), None)
    assert engine.is_offloaded is is_wanted
    worker.save(tmp_path).result()
    assert engine.is_offloaded is is_wanted

"""What `/v1/groups` and `/v1/trajectories` answer, of a run that goes on and of one that is over."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["train", "evaluation"]
Sort = Literal["step", "reward", "length", "staleness"]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Group(Model):
    """All samples of one attempt at a task. Its kind, step, task and attempt tell it from all others."""

    kind: Kind = Field(description="Made to be trained on, or for an evaluation.", examples=["train"])
    step: int = Field(description="Of the newest version that made a token of it.", examples=[12])
    task_id: str = Field(description="Epoch and row.", examples=["0/17"])
    attempt: int = Field(examples=[1])
    outcome: str = Field(description="`accepted`, or `rejected` by the filter.", examples=["accepted"])
    prompt: str = Field(description="How its first sample begins.", examples=["sort 52814107="])
    num_samples: int = Field(examples=[16])
    reward: float | None = Field(description="Mean over samples.", examples=[0.75])
    reward_min: float | None = Field(examples=[0.0])
    reward_max: float | None = Field(examples=[1.0])
    length: float = Field(description="Generated tokens, mean over samples.", examples=[9.0])
    length_max: int = Field(examples=[11])
    version_min: int | None = Field(
        description="Step of the oldest version of a token; null: none made.", examples=[11]
    )
    version_max: int | None = Field(examples=[12])
    consumed_step: int | None = Field(description="The step that trained on it; null: none known.", examples=[13])
    staleness: int | None = Field(description="`consumed_step` minus `version_min`.", examples=[2])


class Sample(Model):
    """One sample of a group."""

    sample: int = Field(description="Its number in the group, from 0.", examples=[0])
    reward: float | None = Field(examples=[1.0])
    length: int = Field(description="Generated tokens.", examples=[9])
    num_tokens: int = Field(description="All tokens, the prompt's too.", examples=[23])
    version_min: int | None = Field(examples=[11])
    version_max: int | None = Field(examples=[12])
    stop_reason: str = Field(examples=["stop"])


class GroupPage(Model):
    """Some groups, and how to get at the next ones."""

    groups: list[Group]
    total: int = Field(description="Groups that pass the filters.", examples=[640])
    next: str | None = Field(description="The `cursor` of the next page; null: there is none.")
    unread_bytes: int = Field(
        description="Of dumps that are not in the index yet; more groups will come.", examples=[0]
    )
    note: str = Field(description="Why there is nothing to see, and what to set; empty: there is.")


class SampledGroup(Group):
    """A group with its samples."""

    samples: list[Sample]


class TaskGroups(Model):
    """Every group that was made of a task, newest first."""

    task_id: str
    groups: list[SampledGroup]


class Trained(Model):
    """What the trainer made of the tokens of a sample: an entry a token; null before the first generated one."""

    step: int = Field(description="The step that trained on it.")
    reward: float | None = Field(description="After penalty, scaling, clipping and normalisation.")
    loss_mask: list[bool] = Field(description="Carried gradient, after the staleness rule.")
    advantages: list[float | None]
    prox_logp: list[float | None] | None = Field(
        description="Log-prob under the policy at the start of the step; null: the objective needs none."
    )
    logp: list[float | None] = Field(description="Log-prob in the update's own forward pass.")
    divergence: list[float | None] = Field(
        description="`prox_logp` (without it `logp`) minus the log-prob of the engine that made the token."
    )


class Trajectory(Sample):
    """One sample with its tokens. Lists have an entry a token."""

    kind: Kind
    step: int
    task_id: str
    attempt: int
    outcome: str
    prompt_len: int = Field(description="Tokens before the first generated one.")
    metrics: dict[str, float]
    pieces: list[str] | None = Field(
        description="The text that each token adds; '' where a character goes on. Null: there is no tokenizer."
    )
    text: str = Field(description="The whole text.")
    token_ids: list[int]
    logprobs: list[float | None] = Field(description="Under the policy that made the token; 0 elsewhere.")
    versions: list[int] = Field(description="Step of the version that made the token; -1: none.")
    loss_mask: list[bool]
    trained: Trained | None = Field(description="Null: not trained on, or not written.")

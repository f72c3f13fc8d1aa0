"""Between the core's dataclasses and their wire form: arrays travel packed, little-endian."""

import numpy as np

from headway.core.trajectory import Group, Outcome, StopReason, Trajectory
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.v1 import types_pb2 as pb

STOP_TO_WIRE = {reason: pb.StopReason.Value(f"STOP_REASON_{reason.name}") for reason in StopReason}
STOP_FROM_WIRE = {number: reason for reason, number in STOP_TO_WIRE.items()}
OUTCOME_TO_WIRE = {outcome: pb.Outcome.Value(f"OUTCOME_{outcome.name}") for outcome in Outcome}
OUTCOME_FROM_WIRE = {number: outcome for outcome, number in OUTCOME_TO_WIRE.items()}


def version_to_wire(version: PolicyVersion) -> pb.PolicyVersion:
    return pb.PolicyVersion(term=version.term, step=version.step)


def version_from_wire(message: pb.PolicyVersion) -> PolicyVersion:
    return PolicyVersion(message.term, message.step)


def trajectory_to_wire(trajectory: Trajectory) -> pb.Trajectory:
    return pb.Trajectory(
        input_ids=trajectory.input_ids.astype("<i4", copy=False).tobytes(),
        logprobs=trajectory.logprobs.astype("<f4", copy=False).tobytes(),
        loss_mask=trajectory.loss_mask.astype("u1", copy=False).tobytes(),
        versions=trajectory.versions.astype("<i4", copy=False).tobytes(),
        reward=trajectory.reward,
        stop_reason=STOP_TO_WIRE[trajectory.stop_reason],
        metrics=trajectory.metrics,
    )


def trajectory_from_wire(message: pb.Trajectory) -> Trajectory:
    """Read a trajectory; its arrays are read-only views of the message's bytes.

    Raises:
        InvalidInput: The arrays differ in length, or the stop reason is missing.
    """
    input_ids = np.frombuffer(message.input_ids, "<i4")
    logprobs = np.frombuffer(message.logprobs, "<f4")
    loss_mask = np.frombuffer(message.loss_mask, "?")
    versions = np.frombuffer(message.versions, "<i4")
    lengths = {len(input_ids), len(logprobs), len(loss_mask), len(versions)}
    if len(lengths) != 1:
        raise InvalidInput(f"a trajectory's arrays differ in length: {sorted(lengths)}")
    if message.stop_reason not in STOP_FROM_WIRE:
        raise InvalidInput("a trajectory has no stop reason")
    stop_reason = STOP_FROM_WIRE[message.stop_reason]
    return Trajectory(input_ids, logprobs, loss_mask, versions, message.reward, stop_reason, dict(message.metrics))


def group_to_wire(group: Group) -> pb.Group:
    return pb.Group(
        task_id=group.task_id,
        trajectories=[trajectory_to_wire(trajectory) for trajectory in group.trajectories],
        attempt=group.attempt,
        rollout_s=group.rollout_s,
    )


def group_from_bytes(serialized: bytes) -> Group:
    """Read a serialized `headway.v1.Group`."""
    return group_from_wire(pb.Group.FromString(serialized))


def group_from_wire(message: pb.Group) -> Group:
    trajectories = tuple(trajectory_from_wire(trajectory) for trajectory in message.trajectories)
    return Group(message.task_id, trajectories, message.attempt, message.rollout_s)

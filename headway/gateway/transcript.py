"""What was generated in a session: a tree of turns, whose branches become trajectories.

    told --> answer --+--> told --> answer --> told --> answer       branch 1
                      +--> told --> answer                           branch 2: the client went back, or edited
    told --> answer                                                  branch 3: another beginning

A turn is what the model was told, and the answer that it generated, both as token ids; ids are only ever appended. A
request whose messages begin with those of a known turn continues that turn's ids.

Guarantee: each generated token carries gradient in exactly one trajectory. Turns that several branches share carry it
in the newest one; in the others they are prompt, like all that no policy generated: mask 0, version -1, log-prob 0.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway.core.trajectory import Trajectory
from headway.workflow.api import ModelResponse
from headway.workflow.sequence import TokenSequence


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answer of the model, and what it was told before it since the parent's."""

    id: str
    """The id that the client got with the answer."""
    parent: "Turn | None"
    told: Sequence[int]
    response: ModelResponse
    """Without `input_tokens`: they are the path's."""

    def path(self) -> list["Turn"]:
        """From the branch's first turn to this one."""
        path: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            path.append(turn)
            turn = turn.parent
        return path[::-1]

    def ids(self) -> list[int]:
        """All token ids of the branch up to the end of the answer."""
        return [token for turn in self.path() for part in (turn.told, turn.response.output_tokens) for token in part]

    @property
    def num_tokens(self) -> int:
        """Tokens that this turn adds."""
        return len(self.told) + self.response.output_len


class Transcript:
    """The turns of one session."""

    def __init__(self) -> None:
        self.turns: dict[str, Turn] = {}
        """By id, in the order in which they ended."""
        self.num_tokens = 0
        self._by_key: dict[bytes, Turn] = {}

    def find(self, keys: Sequence[bytes]) -> tuple[int, Turn | None]:
        """The turn whose history is the longest beginning of a conversation, and how many messages that is.

        Args:
            keys: As `history_keys` gives them.
        """
        for count in range(len(keys) - 1, 0, -1):
            if (turn := self._by_key.get(keys[count])) is not None:
                return count, turn
        return 0, None

    def add(self, turn: Turn, key: bytes | None = None) -> None:
        """Take in an answer; `key` names the history that ends with it. Of two that say the same, the first is
        continued."""
        self.turns[turn.id] = turn
        self.num_tokens += turn.num_tokens
        if key is not None:
            self._by_key.setdefault(key, turn)

    def leaves(self) -> list[Turn]:
        """Turns that nothing continued, the newest first."""
        parents = {turn.parent for turn in self.turns.values()}
        return [turn for turn in reversed(self.turns.values()) if turn not in parents]

    def branches(self, reward: float) -> Iterator[Trajectory]:
        """A trajectory for each leaf, the newest first, all with one reward."""
        trained: set[Turn] = set()
        for leaf in self.leaves():
            path = leaf.path()
            yield _trajectory(path, [turn for turn in path if turn not in trained], reward)
            trained.update(path)

    def single_turns(self, rewards: Mapping[str, float]) -> Iterator[Trajectory]:
        """A trajectory for each turn, with its own reward, by id; what came before it is prompt."""
        for turn in self.turns.values():
            yield _trajectory(turn.path(), [turn], rewards[turn.id])

    def returns(self, rewards: Mapping[str, float], discount: float) -> dict[str, float]:
        """The return of each turn: its own reward, and `discount` times the return of the newest turn after it."""
        returns: dict[str, float] = {}
        after: dict[str, float] = {}
        for turn in reversed(self.turns.values()):
            returns[turn.id] = rewards.get(turn.id, 0.0) + discount * after.get(turn.id, 0.0)
            if turn.parent is not None:
                after.setdefault(turn.parent.id, returns[turn.id])
        return returns


def _trajectory(path: Sequence[Turn], trained: Sequence[Turn], reward: float) -> Trajectory:
    sequence = TokenSequence()
    for turn in path:
        sequence.add_prompt(list(turn.told))
        if turn in trained:
            sequence.add_output(turn.response)
        else:
            sequence.add_prompt(turn.response.output_tokens)
    return sequence.trajectory(reward, {"num_turns": float(len(path))})

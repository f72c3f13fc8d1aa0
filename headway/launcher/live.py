"""The live line of `headway up`, and what it says of the trainer."""

from rich.console import Console

from headway.v1 import trainer_pb2 as pb


class LiveLine:
    """One line that is rewritten on a terminal; elsewhere a line for each change of its first two words."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("") if console.is_terminal else None
        self._last = ""

    def __enter__(self) -> "LiveLine":
        if self._status:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._status:
            self._status.stop()
            self._console.print(f"  {self._last}")

    def show(self, text: str) -> None:
        is_new = text.split()[:2] != self._last.split()[:2]
        self._last = text
        if self._status:
            self._status.update(text)
        elif is_new:
            self._console.print(f"  {text}")


class Pace:
    """How long the rest will take, from the steps seen so far."""

    def __init__(self) -> None:
        self._first: tuple[int, float] | None = None

    def seconds_left(self, num_steps: int, total_steps: int, now: float) -> float | None:
        """None: too early to say.

        Example:
            >>> pace = Pace()
            >>> [pace.seconds_left(0, 10, 100.0), pace.seconds_left(4, 10, 108.0)]
            [None, 12.0]
        """
        if self._first is None:
            self._first = (num_steps, now)
        done = num_steps - self._first[0]
        return (now - self._first[1]) / done * (total_steps - num_steps) if done else None


def phase_text(status: pb.TrainerStatus) -> str:
    """The trainer's phase in words, with its progress where that is known."""
    name = pb.TrainerPhase.Name(status.phase).removeprefix("TRAINER_PHASE_").lower().replace("_", " ")
    return f"{name} {status.phase_progress:.0%}" if status.phase_progress else name

"""One request's state over its pieces: what is left of the budget, and the tokens so far with their evidence.

Guarantee: the response's three lists have one length; every token is inside the vocabulary, has a finite
log-probability, and the version that its server reported; versions never fall, and are the pinned one where there is
one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headway.core.evidence import Contradiction, check_tokens, versions_of
from headway.core.routing import Wanted
from headway.core.trajectory import StopReason
from headway.core.version import PolicyVersion
from headway.errors import InvalidInput
from headway.workflow.api import ModelRequest, ModelResponse, new_rid
from headway.workflow.errors import PromptTooLong
from services.rollout_controller.piece import Piece, Sampling
from services.rollout_controller.stop_strings import cut_at_stop

PREFIX_TOKENS = 256
"""Without a key, requests whose prompts begin with the same tokens share a server."""
ANY_VOCABULARY = 10_000_000
"""No vocabulary is so large."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What every request must fit into; None: not known."""

    context_length: int | None = None
    vocabulary: int | None = None


class Generation:
    """A request under way."""

    def __init__(self, request: ModelRequest, limits: Limits, pinned: PolicyVersion | None, key: str = "") -> None:
        """Check a request before anything is sent: an id outside the vocabulary kills some engines.

        Raises:
            InvalidInput: The prompt is empty, or has ids outside the vocabulary.
            PromptTooLong: There is no room for a single token.
        """
        self._request = request
        self._limits = limits
        self._pinned = pinned
        self._key = key or str(hash(tuple(request.input_ids[:PREFIX_TOKENS])))
        self._stops = tuple(request.gconfig.stop or ()) + tuple(
            s for s in request.tool_call_stops if isinstance(s, str)
        )
        self.ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._last: PolicyVersion | None = None
        self.stop_reason: StopReason | None = None
        self.num_pieces = 0
        self.idle_pieces = 0
        """Pieces in a row that brought nothing, those apart that were ended for an update."""
        self.was_paused = False
        """The server was paused during the last piece."""
        self.failures: dict[str, str] = {}
        """Servers that failed since the last progress, and how."""
        self._server = ""
        self._budget = self._checked_budget()

    def wanted(self) -> Wanted:
        """What the next piece asks of its server."""
        tokens = len(self._request.input_ids) + self._budget
        return Wanted(tokens, self._key, self._last, self._pinned, self.failures.keys())

    def next_piece(self, label: str, knows_stop_strings: bool) -> Piece:
        """What the next server is asked for: go on after the tokens so far, with what is left of the budget."""
        if self._stops and not knows_stop_strings and self._request.tokenizer is None:
            raise InvalidInput("stop strings need ModelRequest.tokenizer: the server has none")
        self.num_pieces += 1
        sampling = self._sampling(knows_stop_strings)
        return Piece(new_rid(), self._request.input_ids + self.ids, sampling, label)

    def accept(
        self, piece: Piece, server: str, knows_stop_strings: bool, is_known: Callable[[PolicyVersion], bool]
    ) -> None:
        """Take a piece that has ended.

        Raises:
            Contradiction: It cannot be believed; the generation is over.
        """
        check_tokens(piece.ids, piece.logprobs, self._limits.vocabulary)
        if piece.spans is None or piece.finish is None:
            raise Contradiction("a reply names no version for its tokens")
        for version, count in versions_of(piece.spans, len(piece.ids), is_known, self._last):
            if self._pinned is not None and version != self._pinned:
                raise Contradiction(f"{version.label} made tokens of a request that is pinned to {self._pinned.label}")
            self._versions += [version.step] * count
            self._last = version
        start = len(self.ids)
        self.ids += piece.ids
        self._logprobs += piece.logprobs
        self._server = server
        self._note_progress(len(piece.ids))
        self._end(piece, start, knows_stop_strings)

    def note_failure(self, server: str, reason: str) -> None:
        """A server failed; others are tried first."""
        self.failures[server] = reason

    def response(self, latency_s: float) -> ModelResponse:
        return ModelResponse(
            input_tokens=self._request.input_ids,
            output_tokens=self.ids,
            output_logprobs=self._logprobs,
            output_versions=self._versions,
            stop_reason=self.stop_reason or StopReason.ABORT,
            num_pieces=self.num_pieces,
            latency_s=latency_s,
            server=self._server,
        )

    def _checked_budget(self) -> int:
        ids, vocabulary, gconfig = self._request.input_ids, self._limits.vocabulary, self._request.gconfig
        if not ids:
            raise InvalidInput(f"request {self._request.rid} has an empty prompt")
        if min(ids) < 0 or (vocabulary is not None and max(ids) >= vocabulary):
            raise InvalidInput(
                f"request {self._request.rid} has token ids from {min(ids)} to {max(ids)}; the model's vocabulary has "
                f"{vocabulary}: is its tokenizer the model's?"
            )
        room = gconfig.max_tokens
        if self._limits.context_length is not None:
            room = min(room, self._limits.context_length - 1)  # some releases of SGLang refuse the last token
        if room <= len(ids):
            raise PromptTooLong(
                f"a prompt of {len(ids)} tokens leaves no room: gconfig.max_tokens is {gconfig.max_tokens}, "
                f"the context {self._limits.context_length}"
            )
        return min(gconfig.max_new_tokens, room - len(ids))

    def _sampling(self, knows_stop_strings: bool) -> Sampling:
        gconfig, have = self._request.gconfig, len(self.ids)
        stop_ids = tuple(gconfig.stop_token_ids) + tuple(s for s in self._request.tool_call_stops if isinstance(s, int))
        return Sampling(
            max_new_tokens=self._budget - have,
            min_new_tokens=max(0, min(gconfig.min_new_tokens, self._budget) - have),
            temperature=0.0 if gconfig.greedy else gconfig.temperature,
            top_p=gconfig.top_p,
            top_k=self._top_k(),
            frequency_penalty=gconfig.frequency_penalty,
            stop=self._stops if knows_stop_strings else (),
            stop_token_ids=stop_ids,
            ignore_eos=gconfig.ignore_eos,
        )

    def _top_k(self) -> int:
        """-1 where it cuts nothing off."""
        top_k = self._request.gconfig.top_k
        return top_k if 0 < top_k < (self._limits.vocabulary or ANY_VOCABULARY) else -1

    def _note_progress(self, gained: int) -> None:
        if gained:
            self.idle_pieces = 0
            self.failures.clear()
        elif not self.was_paused:
            self.idle_pieces += 1

    def _end(self, piece: Piece, start: int, knows_stop_strings: bool) -> None:
        """Decide whether the generation is over with this piece."""
        finish = piece.finish
        if self._cut(start, knows_stop_strings) or finish is None:
            return
        if finish.kind == "stop":
            self.stop_reason = self._reason_of(finish.matched)
        elif finish.kind == "length" or len(self.ids) >= self._budget:
            self.stop_reason = StopReason.LENGTH

    def _cut(self, start: int, knows_stop_strings: bool) -> bool:
        """End at a stop string that the server could not see."""
        could_see = knows_stop_strings and self.num_pieces == 1
        tokenizer = self._request.tokenizer
        if not self._stops or could_see or tokenizer is None or len(self.ids) == start:
            return False
        found = cut_at_stop(self.ids, start, self._stops, tokenizer.decode)
        if found is None:
            return False
        keep, matched = found
        del self.ids[keep:], self._logprobs[keep:], self._versions[keep:]
        self.stop_reason = self._reason_of(matched)
        return True

    def _reason_of(self, matched: str | int | None) -> StopReason:
        return StopReason.TOOL_CALLS if matched in self._request.tool_call_stops else StopReason.STOP

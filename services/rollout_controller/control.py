"""What people change while a run goes on: pause, settings, servers taken out of routing. Kept over a restart.

The journal's `meta` holds what was changed, and what the experiment file said then. A restarted controller takes it up
again, unless the file says something else by now, or a new run begins: then the file holds.
"""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import orjson

from headway.runtime.waits import Waits
from services.rollout_controller.controller import RolloutController
from services.rollout_controller.fleet import Fleet
from services.rollout_controller.views import PauseStatus, SettingsChange, SettingsView

KEY = "control"
ETA, CONCURRENT = "max_head_offpolicyness", "max_concurrent_rollouts"


@dataclass
class Control:
    """Acts on a controller and its fleet.

    Args:
        clock: Unix seconds.
    """

    controller: RolloutController
    fleet: Fleet
    waits: Waits
    clock: Callable[[], float] = time.time
    _reason: str = ""
    _paused_at: float = 0.0
    _shown: ExitStack = field(default_factory=ExitStack)
    _file: dict[str, int] = field(default_factory=dict)
    """What the experiment file says."""
    _is_restored: bool = False
    """What holds was changed in an earlier life of this process."""

    async def restore(self) -> None:
        """Take up what was changed before a restart; called once, before anything runs."""
        self._file = self._settings()
        self.controller.on_fresh = self._forget_restored
        kept = orjson.loads(await self.controller.remembered(KEY) or "{}")
        if not kept:
            return
        self._is_restored = True
        changed = {name: value for name, value in kept["changed"].items() if kept["file"][name] == self._file[name]}
        self._apply(self._file | changed)
        self.fleet.drained.update(kept["drained"])
        if kept["is_paused"]:
            self._pause(kept["reason"], kept["paused_at"])

    # ---- pause

    def pause_status(self) -> PauseStatus:
        is_paused = self.controller.is_held
        since_s = max(0.0, self.clock() - self._paused_at) if is_paused else None
        return PauseStatus(is_paused=is_paused, reason=self._reason, since_s=since_s)

    async def pause(self, reason: str) -> PauseStatus:
        """Start no new rollouts; those that run end, and are used."""
        self._resume()
        self._pause(reason, self.clock())
        await self._keep()
        return self.pause_status()

    async def resume(self) -> PauseStatus:
        """Start rollouts again."""
        self._resume()
        await self._keep()
        return self.pause_status()

    def _pause(self, reason: str, at: float) -> None:
        self._reason, self._paused_at = reason, at
        self.controller.hold(True)
        self._shown.enter_context(self.waits.waiting_for(f"new rollouts to be resumed: {reason or 'paused by people'}"))

    def _resume(self) -> None:
        self._reason = ""
        self._shown.close()
        self.controller.hold(False)

    # ---- settings

    def settings(self) -> SettingsView:
        now = self._settings()
        changed = {name: value for name, value in self._file.items() if now[name] != value}
        return SettingsView(**now, file=changed)

    async def change(self, change: SettingsChange) -> SettingsView:
        """Change those that are given."""
        self._apply(self._settings() | change.model_dump(exclude_none=True))
        await self._keep()
        return self.settings()

    def _settings(self) -> dict[str, int]:
        settings = self.controller.settings
        return {ETA: settings.eta, CONCURRENT: settings.max_concurrent}

    def _apply(self, settings: dict[str, int]) -> None:
        self.controller.change(settings[ETA], settings[CONCURRENT])

    # ---- servers

    async def drain(self, name: str, is_drained: bool) -> None:
        """Take a server out of routing, or back; its running requests end there.

        Raises:
            NotFound: There is no such server.
        """
        self.fleet.drain(name, is_drained)
        await self._keep()

    # ---- over a restart

    async def _keep(self) -> None:
        self._is_restored = False
        now = self._settings()
        kept = {
            "file": self._file,
            "changed": {name: value for name, value in now.items() if value != self._file[name]},
            "is_paused": self.controller.is_held,
            "reason": self._reason,
            "paused_at": self._paused_at,
            "drained": self.fleet.drained,
        }
        await self.controller.remember(KEY, orjson.dumps(kept).decode())

    def _forget_restored(self) -> None:
        """A new run begins: what was changed in an earlier one is over."""
        if self._is_restored:
            self._is_restored = False
            self._resume()
            self._apply(self._file)

"""Policy versions: ordered pairs (term, step), and the label under which an engine serves one."""

import re
from typing import NamedTuple

LABEL = re.compile(r"v(\d+)\.(\d+)")


class PolicyVersion(NamedTuple):
    """The weights that `step` completed train steps made, under leadership `term`.

    Example:
        >>> PolicyVersion(1, 12).label
        'v1.12'
        >>> PolicyVersion.parse("v1.12") < PolicyVersion(2, 0)
        True
    """

    term: int
    step: int

    @property
    def label(self) -> str:
        """The name of the version's folder, and what engines report as `weight_version`."""
        return f"v{self.term}.{self.step}"

    @classmethod
    def parse(cls, label: str) -> "PolicyVersion":
        """Read a label.

        Raises:
            ValueError: It is not of the form `vTERM.STEP`.
        """
        match = LABEL.fullmatch(label)
        if match is None:
            raise ValueError(f"{label!r} is not a version label like 'v1.12'")
        return cls(int(match[1]), int(match[2]))

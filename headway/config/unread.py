"""Keys that nothing acts on in this version. Set to anything but their default, they are told in a note at load.

A test compares this list with what the code reads: a key that gains its reader leaves it, one that loses it enters.
Lists of sections appear as `key.0`.
"""

UNREAD: frozenset[str] = frozenset()

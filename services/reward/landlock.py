"""Let this process read files, and neither change one nor dial out: the kernel's Landlock, without a library.

Like seccomp it needs no privilege, only ever narrows, and holds for everything that the process starts.
"""

import ctypes
import os
import platform
import struct
from functools import cache

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION_FLAG = 1
RULE_PATH_BENEATH = 1
PR_SET_NO_NEW_PRIVS = 38

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
READING = EXECUTE | READ_FILE | READ_DIR
RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many file-system rights each version of the interface knows; later ones know no more."""
TCP_RIGHTS = 0b11
SCOPES = 0b11


@cache
def abi_version() -> int:
    """Version of the kernel's Landlock; 0: there is none."""
    if platform.system() != "Linux":
        return 0
    return max(0, int(_libc().syscall(CREATE_RULESET, None, 0, VERSION_FLAG)))


def is_available() -> bool:
    return abi_version() > 0


def only_read() -> None:
    """From now on, read and execute files, and nothing else: no writes, no TCP, no signals to outside.

    Writing to descriptors that are open already stays possible.

    Raises:
        OSError: The kernel refuses.
    """
    abi = abi_version()
    handled_files = (1 << RIGHTS_BY_ABI[min(abi, max(RIGHTS_BY_ABI))]) - 1
    attributes = struct.pack("=QQQ", handled_files, TCP_RIGHTS if abi >= 4 else 0, SCOPES if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = _checked(_libc().syscall(CREATE_RULESET, attributes, size, 0))
    try:
        _allow_beneath(ruleset, "/", READING)
        _allow_beneath(ruleset, os.devnull, READ_FILE | WRITE_FILE)
        _checked(_libc().prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        _checked(_libc().syscall(RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)


def _allow_beneath(ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", rights, descriptor)
        _checked(_libc().syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

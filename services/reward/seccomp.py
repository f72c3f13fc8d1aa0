"""Forbid system calls to this process or to a program: small seccomp filters, built here and loaded without libseccomp.

A filter allows everything but what it names, and answers the rest with EPERM, so that a program sees a refusal and not
a sudden death. Filters only ever add up; none can be taken back.

    worker_filter         for a worker that runs reward functions that start no processes
    open_filter           for a worker whose functions do
    program_filter        for model-written code inside bubblewrap

Linux on x86_64 and aarch64; elsewhere `is_available` is false and nothing is filtered.
"""

import ctypes
import errno
import os
import platform
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
PR_GET_SECCOMP = 21
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x00010000

LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL = 0x7FFF0000, 0x80000000
REFUSE = 0x00050000 | errno.EPERM
ABSENT = 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16
X32_BIT = 0x40000000

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CALLS: dict[str, tuple[int | None, int | None]] = {
    # name: (x86_64, aarch64); None: the architecture has no such call
    "fork": (57, None),
    "vfork": (58, None),
    "clone": (56, 220),
    "clone3": (435, 435),
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "personality": (135, 92),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
}

OTHER_PROCESSES = (
    "ptrace",
    "process_vm_readv",
    "process_vm_writev",
    "process_madvise",
    "kcmp",
    "pidfd_open",
    "pidfd_getfd",
)
SIGNALS = ("tkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
MACHINE = (
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "perf_event_open", "userfaultfd"),
    *("keyctl", "add_key", "request_key", "mount", "umount2", "pivot_root", "chroot", "unshare", "setns"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "open_tree", "move_mount", "mount_setattr", "open_by_handle_at"),
    *("name_to_handle_at", "fanotify_init", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("kexec_file_load", "reboot", "swapon", "swapoff", "iopl", "ioperm", "modify_ldt", "personality", "quotactl"),
    *("acct", "syslog", "settimeofday", "clock_settime", "sethostname", "setdomainname"),
)
SOCKETS = ("socket", "socketpair")
UNBOUNDED_MEMORY = ("memfd_create", "memfd_secret", "shmget", "msgget", "semget", "mq_open")


@dataclass
class Filter:
    """A filter under construction: a list of BPF instructions (code, jump if true, jump if false, value)."""

    machine: str = field(default_factory=platform.machine)
    program: list[tuple[int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.program += [(LOAD, 0, 0, ARCHITECTURE_AT), (JUMP_EQUAL, 1, 0, ARCHITECTURES[self.machine])]
        self.program += [(RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
        if self.machine == "x86_64":
            self.program += [(JUMP_AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, REFUSE)]

    def _number(self, name: str) -> int | None:
        return CALLS[name][list(ARCHITECTURES).index(self.machine)]

    def refuse(self, names: Iterable[str], answer: int = REFUSE) -> None:
        """Answer these calls with an error."""
        for name in names:
            number = self._number(name)
            if number is not None:
                self.program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]

    def allow_with_bit(self, name: str, argument: int, bit: int) -> None:
        """Refuse a call unless its argument has the bit."""
        self._allow_if(name, argument, [(JUMP_ANY_BIT, 0, 1, bit)])

    def allow_with_value(self, name: str, argument: int, value: int) -> None:
        """Refuse a call unless the lower half of its argument has the value."""
        self._allow_if(name, argument, [(JUMP_EQUAL, 0, 1, value)])

    def refuse_values(self, name: str, argument: int, values: Iterable[int]) -> None:
        """Refuse a call when the lower half of its argument has one of the values."""
        number = self._number(name)
        refused = [value & 0xFFFFFFFF for value in values]
        if number is not None:
            self.program += [(JUMP_EQUAL, 0, 2 * len(refused) + 2, number)]
            self.program += [(LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
            for value in refused:
                self.program += [(JUMP_EQUAL, 0, 1, value), (RETURN, 0, 0, REFUSE)]
            self.program += [(RETURN, 0, 0, ALLOW)]

    def _allow_if(self, name: str, argument: int, test: list[tuple[int, int, int, int]]) -> None:
        number = self._number(name)
        if number is not None:
            low_half = ARGUMENTS_AT + 8 * argument
            self.program += [(JUMP_EQUAL, 0, 4, number), (LOAD, 0, 0, low_half), *test]
            self.program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]

    def refuse_processes(self) -> None:
        """Threads may be started, processes may not. clone3 looks absent, because its flags cannot be seen: libc then
        uses clone."""
        self.refuse(("fork", "vfork"))
        self.refuse(("clone3",), ABSENT)
        self.allow_with_bit("clone", 0, CLONE_THREAD)

    def packed(self) -> bytes:
        """The program as the kernel and `bwrap --seccomp` read it."""
        return b"".join(struct.pack("=HBBI", *step) for step in [*self.program, (RETURN, 0, 0, ALLOW)])


def program_filter() -> bytes:
    """For model-written code: one process, no sockets, nothing of the machine, no memory beyond its limits."""
    built = Filter()
    built.refuse((*OTHER_PROCESSES, *MACHINE, *SOCKETS, *UNBOUNDED_MEMORY))
    built.refuse_processes()
    return built.packed()


def worker_filter(is_sealed: bool) -> bytes:
    """For a worker: no processes, no signals but to itself, nothing of the machine; sealed: no sockets either."""
    built = Filter()
    built.refuse((*OTHER_PROCESSES, *MACHINE, *SIGNALS, *(SOCKETS if is_sealed else ())))
    built.allow_with_value("kill", 0, os.getpid())
    built.allow_with_value("tgkill", 0, os.getpid())
    built.refuse_processes()
    return built.packed()


def open_filter(protected: Iterable[int]) -> bytes:
    """For a worker that starts processes: no signals to these processes, to their groups, or to everybody."""
    built = Filter()
    targets = [-1, *(sign * pid for pid in protected for sign in (1, -1))]
    for name in ("kill", "tgkill", "tkill", "rt_sigqueueinfo", "pidfd_open"):
        built.refuse_values(name, 0, targets)
    built.refuse(("ptrace",))
    return built.packed()


@cache
def is_available() -> bool:
    """Whether this kernel filters system calls, on an architecture known here."""
    if platform.system() != "Linux" or platform.machine() not in ARCHITECTURES:
        return False
    return int(_libc().prctl(PR_GET_SECCOMP, 0, 0, 0, 0)) >= 0


def apply(packed: bytes) -> None:
    """Filter this process's calls from now on, and those of everything that it becomes.

    Raises:
        OSError: The kernel refuses.
    """
    libc = _libc()
    steps = ctypes.create_string_buffer(packed, len(packed))
    program = _Program(len(packed) // 8, ctypes.cast(steps, ctypes.c_void_p))
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"seccomp: {os.strerror(number)}")


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

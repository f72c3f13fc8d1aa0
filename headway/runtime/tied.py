"""Become another program that dies with its parent: `python tied.py SIGNAL PARENT_PID PROGRAM ARGUMENT...`.

Run as a file, with nothing of the project imported, so that it costs milliseconds.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    number, parent, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):
            sys.exit("the parent has ended already")
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()

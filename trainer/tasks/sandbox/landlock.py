"""Landlock: which files a process may open, by the kernel, without any privilege.

A ruleset is built once, before the forks, and each fork restricts itself with it. It allows reading the standard
library and writing to /dev/null. Whatever Landlock's version (ABI) can restrict beyond that is restricted: all other
files, TCP ports, signals and abstract sockets to processes outside.

The standard library is allowed entry by entry, without site-packages and dist-packages: a rule on the whole folder
would let a program read tests that are installed there (measured). Names stay visible: Landlock does not restrict
stat and readlink, so a program can learn that a file exists and how large it is, though not what is in it.

Source: Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h of the Linux kernel.
"""

import ctypes
import os
import struct
import sysconfig
from collections.abc import Iterable

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # on every architecture
GET_VERSION, RULE_PATH_BENEATH = 1, 1

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE
ALL_RIGHTS_OF_ABI_1 = (1 << 13) - 1
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15  # since ABI 2, 3 and 5
BIND_TCP, CONNECT_TCP = 1, 2  # since ABI 4
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2  # since ABI 6
NOT_STANDARD = ("site-packages", "dist-packages")


class KernelCalls:
    """Raw system calls through the C library."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.syscall.restype = ctypes.c_long

    def syscall(self, number: int, *args: int | bytes | None) -> int:
        """The result of a system call; OSError where it failed."""
        wide = [ctypes.c_long(x) if isinstance(x, int) else ctypes.c_char_p(x) for x in args]
        return self._checked(self._libc.syscall(ctypes.c_long(number), *wide), f"system call {number}")

    def prctl(self, option: int, *args: int | bytes) -> None:
        """One prctl; OSError where it failed."""
        padded = [*args, 0, 0, 0, 0][:4]
        wide = [ctypes.c_ulong(x) if isinstance(x, int) else ctypes.c_char_p(x) for x in padded]
        self._checked(self._libc.prctl(option, *wide), f"prctl {option}")

    @staticmethod
    def _checked(result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), what)
        return result


def abi_version(kernel: KernelCalls) -> int:
    """Landlock's version in the running kernel; OSError where it has none or it is switched off."""
    return kernel.syscall(CREATE_RULESET, None, 0, GET_VERSION)


def standard_library() -> tuple[list[str], list[str]]:
    """(folders that may be listed, entries that may be read with all below)."""
    folders = sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
    entries = [entry.path for folder in folders for entry in os.scandir(folder) if entry.name not in NOT_STANDARD]
    return folders, [path for path in entries if os.path.exists(path)]  # a link may point nowhere


def build_ruleset(kernel: KernelCalls, also_readable: Iterable[str] = ()) -> tuple[int, int]:
    """(descriptor, ABI) of the ruleset; files and folders of `also_readable` may be read too. OSError as above."""
    abi = abi_version(kernel)
    handled = ALL_RIGHTS_OF_ABI_1
    handled |= (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)
    attributes = struct.pack("QQQ", handled, BIND_TCP | CONNECT_TCP, SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)
    attributes = attributes[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    ruleset = kernel.syscall(CREATE_RULESET, attributes, len(attributes), 0)
    folders, entries = standard_library()
    rules = [(folder, READ_DIR) for folder in folders]
    rules += [(path, READ_FILE | READ_DIR) for path in (*entries, *also_readable)]
    for path, rights in (*rules, (os.devnull, READ_FILE | WRITE_FILE)):
        _allow(kernel, ruleset, path, rights)
    return ruleset, abi


def restrict_self(kernel: KernelCalls, ruleset: int) -> None:
    """Put the ruleset into force for this thread and all it will start; needs no_new_privs."""
    kernel.syscall(RESTRICT_SELF, ruleset, 0)


def _allow(kernel: KernelCalls, ruleset: int, path: str, rights: int) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights &= ~0 if os.path.isdir(path) else FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        kernel.syscall(ADD_RULE, ruleset, RULE_PATH_BENEATH, rule, 0)
    finally:
        os.close(descriptor)

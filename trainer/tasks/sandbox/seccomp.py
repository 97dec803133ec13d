"""seccomp-BPF: which system calls a process may make. What Landlock does not cover is denied here.

An allow-list: what Python's interpreter, its threads and an event loop need. A call that was forgotten is denied, which
may be unfair to an honest program but is never a hole. Denied calls give EPERM; clone3, whose flags lie behind a
pointer, and numbers newer than this table give ENOSYS, upon which the C library takes the older call. A system call of
another architecture, or of x32, kills.

Some calls depend on their arguments. clone: threads only, in no new namespace. kill, tgkill: only to itself.
socketpair: only AF_UNIX (asyncio's wake-up). prlimit64: reading its own limits. prctl: names, so that PDEATHSIG stays.
fcntl, ioctl: listed commands, so that no descriptor gets an owner in another process, whose readiness signal would be
a way round the ban on kill. open with O_TRUNC is denied where Landlock is older than ABI 3, which would let it cut a
readable file off.

Numbers: asm/unistd_64.h and, for aarch64, asm-generic/unistd.h of the Linux kernel.
"""

import errno
import os
import struct
from dataclasses import dataclass

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine: column of the tables, AUDIT_ARCH value."""

# name, number on x86_64, number on aarch64 (- where the call does not exist)
ALLOWED = """
read 0 63, write 1 64, close 3 57, stat 4 -, fstat 5 80, lstat 6 -, poll 7 -, lseek 8 62, mmap 9 222, mprotect 10 226,
munmap 11 215, brk 12 214, rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67,
pwrite64 18 68, readv 19 65, writev 20 66, access 21 -, pipe 22 -, select 23 -, sched_yield 24 124, mremap 25 216,
msync 26 227, madvise 28 233, dup 32 23, dup2 33 -, pause 34 -, nanosleep 35 101, getitimer 36 102, alarm 37 -,
setitimer 38 103, getpid 39 172, sendfile 40 71, sendto 44 206, recvfrom 45 207, shutdown 48 210, getsockname 51 204,
getpeername 52 205, getsockopt 55 209, exit 60 93, wait4 61 260, uname 63 160, fsync 74 82, fdatasync 75 83,
ftruncate 77 46, getdents 78 -, getcwd 79 17, chdir 80 49, fchdir 81 50, readlink 89 -, umask 95 166,
gettimeofday 96 169, getrlimit 97 163, getrusage 98 165, sysinfo 99 179, times 100 153, getuid 102 174, getgid 104 176,
geteuid 107 175, getegid 108 177, getppid 110 173, getpgrp 111 -, getgroups 115 158, capget 125 90, getresuid 118 148,
getresgid 120 150, getpgid 121 155, getsid 124 156, rt_sigpending 127 136, rt_sigtimedwait 128 137,
rt_sigsuspend 130 133, sigaltstack 131 132, statfs 137 43, fstatfs 138 44, getpriority 140 141, sched_getparam 143 121,
sched_getscheduler 145 120, sched_get_priority_max 146 125, sched_get_priority_min 147 126,
sched_rr_get_interval 148 127, arch_prctl 158 -, gettid 186 178, time 201 -, futex 202 98, sched_getaffinity 204 123,
epoll_create 213 -, getdents64 217 61, set_tid_address 218 96, restart_syscall 219 128, timer_create 222 107,
timer_settime 223 110, timer_gettime 224 108, timer_getoverrun 225 109, timer_delete 226 111, clock_gettime 228 113,
clock_getres 229 114, clock_nanosleep 230 115, exit_group 231 94, epoll_wait 232 -, epoll_ctl 233 21, waitid 247 95,
newfstatat 262 79, readlinkat 267 78, faccessat 269 48, pselect6 270 72, ppoll 271 73, set_robust_list 273 99,
epoll_pwait 281 22, signalfd 282 -, timerfd_create 283 85, eventfd 284 -, timerfd_settime 286 86,
timerfd_gettime 287 87, signalfd4 289 74, eventfd2 290 19, epoll_create1 291 20, dup3 292 24, pipe2 293 59,
preadv 295 69, pwritev 296 70, getcpu 309 168, getrandom 318 278, copy_file_range 326 285, preadv2 327 286,
pwritev2 328 287, statx 332 291, rseq 334 293, close_range 436 436, faccessat2 439 439, epoll_pwait2 441 441,
futex_waitv 449 449
"""
IOCTL, FCNTL, PRCTL, CLONE, KILL, TGKILL = (16, 29), (72, 25), (157, 167), (56, 220), (62, 129), (234, 131)
SOCKETPAIR, PRLIMIT64, OPEN, OPENAT, CLONE3 = (53, 199), (302, 261), (2, None), (257, 56), (435, 435)
FIRST_UNKNOWN, X32_BIT = 452, 0x40000000

CLONE_THREAD, CLONE_NAMESPACES = 0x00010000, 0x7E020080
AF_UNIX, O_TRUNC = 1, 0o1000
PRCTL_OPTIONS = (2, 3, 15, 16, 21, 39, 0x53564D41)
"""Read PDEATHSIG, dumpable, seccomp mode, no_new_privs; set and get the thread's name; name a mapping."""
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Duplicate, descriptor flags, status flags, locks, duplicate closed on exec, size of a pipe."""
IOCTL_REQUESTS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal (two ways), its size, bytes waiting, non-blocking, not closed on exec, closed on exec."""

LOAD, EQUAL, GREATER, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
ALLOW, KILL_PROCESS = 0x7FFF0000, 0x80000000
EPERM, ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
NUMBER_AT, ARCHITECTURE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # of struct seccomp_data; arguments of 8 bytes each
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
OWN_PID = 0xFEEDC0DE
"""Stands in a program for the process id, which is known only after the fork."""

Op = tuple[int, int, int, int]
"""Code, jump if true, jump if false (instructions to skip), operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A test on the low word of an argument."""

    argument: int
    code: int
    """EQUAL, or ANY_BIT: whether any bit of the value is set."""
    values: tuple[int, ...]
    is_wanted: bool = True
    """Allowed if any of the values matches; if False, only if none does."""


def conditions(column: int, *, denies_truncation: bool) -> list[tuple[int, tuple[Condition, ...]]]:
    """Number of each call whose arguments decide, with the conditions that must all hold."""
    own = Condition(argument=0, code=EQUAL, values=(OWN_PID,))
    rules: list[tuple[tuple[int, int | None], tuple[Condition, ...]]] = [
        (
            CLONE,
            (
                Condition(argument=0, code=ANY_BIT, values=(CLONE_THREAD,)),
                Condition(argument=0, code=ANY_BIT, values=(CLONE_NAMESPACES,), is_wanted=False),
            ),
        ),
        (KILL, (own,)),
        (TGKILL, (own,)),
        (SOCKETPAIR, (Condition(argument=0, code=EQUAL, values=(AF_UNIX,)),)),
        (PRCTL, (Condition(argument=0, code=EQUAL, values=PRCTL_OPTIONS),)),
        (FCNTL, (Condition(argument=1, code=EQUAL, values=FCNTL_COMMANDS),)),
        (IOCTL, (Condition(argument=1, code=EQUAL, values=IOCTL_REQUESTS),)),
    ]
    flags = (O_TRUNC,) if denies_truncation else ()
    for call, argument in ((OPEN, 1), (OPENAT, 2)):
        rules.append((call, (Condition(argument=argument, code=ANY_BIT, values=flags, is_wanted=False),)))
    return [(number, tests) for call, tests in rules if (number := call[column]) is not None]


def allowed_numbers(column: int) -> dict[str, int]:
    """Calls that are allowed whatever their arguments, with their numbers."""
    rows = [entry.split() for entry in ALLOWED.replace("\n", " ").split(",")]
    return {row[0]: int(row[1 + column]) for row in rows if row[1 + column] != "-"}


def filter_template(machine: str | None = None, *, denies_truncation: bool = False) -> bytes:
    """The BPF program with `OWN_PID` in place of the process id. `OSError` for a machine without table."""
    machine = machine or os.uname().machine
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}, only for {', '.join(MACHINES)}")
    column, architecture = MACHINES[machine]
    ops: list[Op] = [(LOAD, 0, 0, ARCHITECTURE_AT), (EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL_PROCESS)]
    ops += [(LOAD, 0, 0, NUMBER_AT)]
    if machine == "x86_64":
        ops += [(AT_LEAST, 0, 1, X32_BIT), (RETURN, 0, 0, KILL_PROCESS)]
    ops += [(AT_LEAST, 0, 1, FIRST_UNKNOWN), (RETURN, 0, 0, ENOSYS)]
    ops += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, ENOSYS)]
    for number, tests in conditions(column, denies_truncation=denies_truncation):
        ops += _only(number, [op for test in tests for op in _test(test)])
    ops += _only(PRLIMIT64[column], _reads_own_limits())
    for first, last in _ranges(sorted(allowed_numbers(column).values())):
        ops += [(AT_LEAST, 0, 2, first), (GREATER, 1, 0, last), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *op) for op in [*ops, (RETURN, 0, 0, EPERM)])


def program_for(template: bytes, pid: int) -> bytes:
    """The template for one process."""
    return template.replace(struct.pack("I", OWN_PID), struct.pack("I", pid))


def _only(number: int, body: list[Op]) -> list[Op]:
    """Instructions for one call: the body ends in EPERM or falls through to ALLOW."""
    body = [*body, (RETURN, 0, 0, ALLOW)]
    return [(EQUAL, 0, len(body), number), *body]


def _test(test: Condition) -> list[Op]:
    """Go on where the condition holds, else return EPERM."""
    ops: list[Op] = [(LOAD, 0, 0, FIRST_ARGUMENT_AT + 8 * test.argument)]
    if test.is_wanted:
        hits = [(test.code, len(test.values) - place, 0, value) for place, value in enumerate(test.values)]
        return [*ops, *hits, (RETURN, 0, 0, EPERM)]
    for value in test.values:
        ops += [(test.code, 0, 1, value), (RETURN, 0, 0, EPERM)]
    return ops


def _reads_own_limits() -> list[Op]:
    """prlimit64(0, resource, NULL, ...): every word of the process id and of the new limits' address is 0."""
    ops: list[Op] = []
    for place in (FIRST_ARGUMENT_AT, FIRST_ARGUMENT_AT + 16, FIRST_ARGUMENT_AT + 20):
        ops += [(LOAD, 0, 0, place), (EQUAL, 1, 0, 0), (RETURN, 0, 0, EPERM)]
    return ops


def _ranges(numbers: list[int]) -> list[tuple[int, int]]:
    """Sorted numbers as inclusive ranges."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges

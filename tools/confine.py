"""The inside of a confined process: gives up rights, then runs the Python source it was sent.

`dlite_agent.tools.process` starts this file as a script, so it imports the standard library only. On Linux the rights
are taken away by the kernel, from root too: Landlock (files below the granted folders only) and a system call filter
(no sockets, no second process or thread, no signals to others, no changed limits). Elsewhere resource limits hold.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Iterator
from typing import Any

CONFINED, NOT_CONFINED = b"+", b"-"
"""What the process writes before anything of the program runs: whether the kernel holds it."""

# Numbers of the system calls that are refused, on x86-64 and AArch64 (None: does not exist there).
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # a second process, thread or program
    **{"clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281)},
    # the network; socketpair and send on it remain, for asyncio
    **{"socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202)},
    **{"accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269)},
    # other processes
    **{"kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138)},
    **{"rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434)},
    **{"pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270), "kcmp": (312, 272)},
    **{"process_vm_writev": (311, 271), "process_madvise": (440, 440), "process_mrelease": (448, 448)},
    **{"migrate_pages": (256, 238), "move_pages": (279, 239), "setpriority": (141, 140), "ioprio_set": (251, 30)},
    **{"sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274)},
    **{"sched_setaffinity": (203, 122), "prctl": (157, 167), "setrlimit": (160, 164)},
    # memory that no limit counts, or that outlives the process
    **{"memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196)},
    **{"semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180), "add_key": (248, 217)},
    **{"request_key": (249, 218), "keyctl": (250, 219)},
    # ways around this filter, and what only administrators need
    **{"io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "bpf": (321, 280)},
    **{"perf_event_open": (298, 241), "userfaultfd": (323, 282), "open_by_handle_at": (304, 265)},
    **{"unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51)},
    **{"pivot_root": (155, 41), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430)},
    **{"fsmount": (432, 432), "mount_setattr": (442, 442), "acct": (163, 89), "swapon": (167, 224)},
    # changes of files that Landlock does not see
    **{"truncate": (76, 45), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7)},
    **{"removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16)},
}
# Changes of a file's mode, owner and times: they succeed and do nothing, so that copying a file works.
_IGNORED: dict[str, tuple[int | None, int | None]] = {
    **{"chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55)},
    **{"lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None)},
    **{"futimesat": (261, None), "utimensat": (280, 88)},
}
# Refused for some values of one argument: (numbers, index of the argument, values; none stands for all but zero).
_DENIED_VALUES: list[tuple[tuple[int, int], int, tuple[int, ...]]] = [
    ((72, 25), 1, (8, 10, 15)),  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX send signals to others
    ((16, 29), 1, (0x8901, 0x8902, 0x5412)),  # ioctl: FIOSETOWN, SIOCSPGRP, TIOCSTI
    ((44, 206), 4, ()),  # sendto with an address
    ((302, 261), 2, ()),  # prlimit64 that sets
]
_FIRST_UNKNOWN_CALL = 449
_CLONE3 = 435
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_EPERM, _ENOSYS = 1, 38
_KILL, _ALLOW, _ERRNO = 0x80000000, 0x7FFF0000, 0x00050000


def main() -> int:
    """Read a specification and the source from standard input, confine this process, run the source."""
    spec = json.loads(_read_exactly(int.from_bytes(_read_exactly(8), "big")))
    os.chdir(spec["cwd"])
    _limit_resources(spec["limits"])
    is_confined = sys.platform == "linux" and _give_up_rights(spec["read"], spec["write"])
    os.write(1, CONFINED if is_confined else NOT_CONFINED)
    if spec["is_required"] and not is_confined:
        return 1
    return run_source(spec["source"])


def run_source(source: str) -> int:
    """Run a program; the value of a last line that is an expression is printed, as a prompt does.

    Returns:
        Its exit status, 1 after an exception. The traceback goes to standard output, without our own frames.
    """
    name = "<code>"
    scope: dict[str, Any] = {"__name__": "__main__"}
    try:
        tree = ast.parse(source, name)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
            if value is not None:
                print(repr(value))
    except SystemExit as request:
        return _exit_status(request.code)
    except BaseException as error:  # the boundary of the program: whatever it raises is its own report
        scope.clear()
        _print_traceback(error, source, name)
        return 1
    finally:
        sys.stdout.flush()
    return 0


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 255
    print(code)
    return 1


def _print_traceback(error: BaseException, source: str, name: str) -> None:
    import linecache  # most programs do not need them, and each call pays for what is imported
    import traceback

    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    report = traceback.TracebackException.from_exception(error, limit=-20)
    report.__cause__ = report.__context__ = None
    report.stack = traceback.StackSummary.from_list([frame for frame in report.stack if frame.filename == name])
    print("".join(report.format()), end="")


def _read_exactly(num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = os.read(0, num_bytes)
        if not part:
            raise EOFError("the specification is cut short")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _limit_resources(limits: dict[str, int]) -> None:
    values = {
        resource.RLIMIT_CPU: limits["cpu_seconds"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "darwin":
        del values[resource.RLIMIT_AS]  # which it refuses to set
    for kind, value in values.items():
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def _give_up_rights(read: list[str], write: list[str]) -> bool:
    """Drop capabilities, restrict files and system calls; return whether all of it holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Capabilities: version 3, this process; then three empty sets of two words.
    libc.syscall(126 if os.uname().machine == "x86_64" else 91, struct.pack("Ii", 0x20080522, 0), bytes(24))
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        return False
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: the agent does not leave a program behind
    is_rooted = _restrict_files(libc, read, write)
    return _filter_calls(libc) and is_rooted


def _restrict_files(libc: Any, read: list[str], write: list[str]) -> bool:
    """Let this process read and write below the given paths only (Landlock, Linux 5.13 and later)."""
    abi = libc.syscall(444, None, 0, 1)
    if abi < 1:
        return False
    handled = (1 << 13) - 1 | (abi >= 2) << 13 | (abi >= 3) << 14 | (abi >= 5) << 15
    attributes = struct.pack("QQQ", handled, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    ruleset = libc.syscall(444, attributes, 8 if abi < 4 else 16 if abi < 6 else 24, 0)
    if ruleset < 0:
        return False
    may_read = 1 << 2 | 1 << 3
    may_write = may_read | 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | (abi >= 2) << 13 | (abi >= 3) << 14
    for paths, access in ((_system_paths() + read, may_read), ([*write, os.devnull], may_write)):
        for path in paths:
            _grant(libc, ruleset, path, access)
    is_done: bool = libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return is_done


def _grant(libc: Any, ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this system
        return
    if not os.path.isdir(path):
        access &= 1 << 1 | 1 << 2 | 1 << 14  # what a file can be granted: write, read, truncate
    libc.syscall(445, ruleset, 1, struct.pack("=Qi", access, descriptor), 0)
    os.close(descriptor)


def _system_paths() -> list[str]:
    """Where the standard library and the libraries it loads lie."""
    return [
        *sys.path,
        os.path.join(sys.base_prefix, "lib"),
        *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/ld.so.cache", "/etc/localtime"),
        *("/dev/zero", "/dev/urandom"),
    ]


def _filter_calls(libc: Any) -> bool:
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    program = b"".join(struct.pack("HBBI", *step) for step in _filter_program(*_ARCHITECTURES[machine]))
    buffer = ctypes.create_string_buffer(program)
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    return bool(libc.prctl(22, 2, header, 0, 0) == 0)  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def _filter_program(column: int, architecture: int) -> Iterator[tuple[int, int, int, int]]:
    """Write the filter as classic BPF: (code, steps to skip if true, if false, operand)."""
    load, equal, at_least, leave = 0x20, 0x15, 0x35, 0x06
    yield load, 0, 0, 4
    yield equal, 1, 0, architecture
    yield leave, 0, 0, _KILL
    yield load, 0, 0, 0
    yield at_least, 0, 1, _FIRST_UNKNOWN_CALL
    yield leave, 0, 0, _ERRNO | _ENOSYS
    answers = [(_CLONE3, _ENOSYS)]  # so that libc falls back to clone, which is refused
    answers += [(number, _EPERM) for number in _numbers(_DENIED, column)]
    answers += [(number, 0) for number in _numbers(_IGNORED, column)]
    for number, errno in answers:
        yield equal, 0, 1, number
        yield leave, 0, 0, _ERRNO | errno
    for pair, index, values in _DENIED_VALUES:
        low = 16 + 8 * index
        checks: list[tuple[int, int, int, int]] = []
        if values:
            checks += [(load, 0, 0, low)]
            for value in values:
                checks += [(equal, 0, 1, value), (leave, 0, 0, _ERRNO | _EPERM)]
        else:
            for offset in (low, low + 4):
                checks += [(load, 0, 0, offset), (equal, 1, 0, 0), (leave, 0, 0, _ERRNO | _EPERM)]
        yield equal, 0, len(checks) + 1, pair[column]
        yield from checks
        yield leave, 0, 0, _ALLOW
    yield leave, 0, 0, _ALLOW


def _numbers(table: dict[str, tuple[int | None, int | None]], column: int) -> list[int]:
    return [number for numbers in table.values() if (number := numbers[column]) is not None]


if __name__ == "__main__":
    sys.exit(main())

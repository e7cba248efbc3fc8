"""The inside of the sandbox (`sandbox.py`): a program of its own that imports nothing of ours. Linux only.

    python -I -S jail.py < job.json          what came of it is one JSON object on stdout

    launcher      new user, mount, process, network, IPC and host-name namespaces; dies with who started it
      warden      process 1 in there: a file tree of read-only binds and one small /tmp, no network, clock, memory, then the end
        answer    no privileges, no inherited environment or files, limits of the kernel (setrlimit), a filter of system calls

The answer's processes die with the warden: the kernel ends a process namespace whole. Sources: namespaces(7), pivot_root(2),
mount_setattr(2), seccomp(2), capset(2). Numbers of system calls are those of Linux's tables for x86-64 and ARM64.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NEW_ANY = 0x7E020000
"""Every flag of clone that makes a namespace."""
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 2, 4, 8, 0x1000, 0x4000, 0x40000, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, ATTR_NOEXEC = 1, 2, 4, 8
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR = 442
NOBODY = 65534
TICK_S = 0.01
MOST_KEPT = 4096
"""Bytes of what the answer wrote to stderr."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3 = 435
REFUSED = {
    # socket, shmget, semget, msgget, ptrace, syslog, personality, pivot_root, chroot, acct, settimeofday, mount, umount2,
    # swapon, reboot, init_module, delete_module, quotactl, clock_settime, mq_open, kexec_load, add_key, request_key, keyctl,
    # unshare, perf_event_open, fanotify_init, name_to_handle_at, open_by_handle_at, setns, process_vm_readv and writev,
    # finit_module, memfd_create, bpf, userfaultfd
    "x86_64": (
        *(41, 29, 64, 68, 101, 103, 135, 155, 161, 163, 164, 165, 166, 167, 169, 175, 176, 179, 227, 240, 246, 248, 249, 250),
        *(272, 298, 300, 303, 304, 308, 310, 311, 313, 319, 321, 323),
    ),
    "aarch64": (
        *(198, 194, 190, 186, 117, 116, 92, 41, 51, 89, 170, 40, 39, 224, 142, 105, 106, 60, 112, 180, 104, 217, 218, 219),
        *(97, 241, 262, 264, 265, 268, 270, 271, 273, 279, 280, 282),
    ),
}
REFUSED_EVERYWHERE = (425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447)
"""io_uring, the new calls that mount, pidfd_getfd, mount_setattr, memfd_secret: of one number everywhere."""
RUNNER = """import os, sys
with open("/tmp/answer.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "answer.py", "exec"), {"__name__": "answer"})
os.write(int(sys.argv[1]), os.read(0, 64))
os._exit(0)
"""
"""Says the word that it is given once everything was carried out: an answer that ends the process has passed nothing."""

libc = ctypes.CDLL(None, use_errno=True)
Job = dict[str, Any]


class SetupError(OSError):
    """The machine does not let the sandbox be built."""


def _call(what: str, result: int) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise SetupError(number, f"{what}: {os.strerror(number)}")


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    arguments = (_bytes(source), _bytes(target), _bytes(kind), ctypes.c_ulong(flags), _bytes(data))
    _call(f"mount {target}", libc.mount(*arguments))


def restrict(target: str, attributes: int, recursive: bool = True) -> None:
    """Of a mount and those below it: read-only, no set-user-id, no devices. Linux 5.12 and newer."""
    given = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), flags, given, ctypes.c_size_t(len(given)))
    _call(f"read-only {target}", result)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise SetupError(error.errno, f"{path}: {error.strerror}") from error


def enter_namespaces() -> None:
    """A user namespace in which we may mount, and the others. Root maps itself and nobody, others only themselves."""
    uid, gid = os.geteuid(), os.getegid()
    ready, begin, done, written = *os.pipe(), *os.pipe()
    me, mapper = os.getpid(), os.fork() if uid == 0 else 0
    if uid == 0 and mapper == 0:
        _map_for(me, ready, written)
    _call("unshare", libc.unshare(NEWUSER | NEWNS | NEWPID | NEWNET | NEWIPC | NEWUTS))
    if uid == 0:
        os.write(begin, b"x")
        said = os.read(done, 200)
        os.waitpid(mapper, 0)
        if said != b"ok":
            raise SetupError(1, said.decode(errors="replace") or "no map of users was written")
    else:
        with contextlib.suppress(SetupError):  # very old kernels have no such file
            _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    for each in (ready, begin, done, written):
        os.close(each)


def _map_for(process: int, ready: int, written: int) -> None:
    """In a process that root keeps outside: only it may map a second user."""
    try:
        os.read(ready, 1)
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/{process}/{name}", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
        os.write(written, b"ok")
    except OSError as error:
        os.write(written, str(error).encode()[:200])
    finally:
        os._exit(0)


def build_tree(job: Job) -> None:
    """The file tree: what is readable, four devices, /proc of these processes alone, and a /tmp of bounded size."""
    root, limits = job["root"], job["limits"]
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=2048,mode=755")
    for path in job["readable"]:
        _bind(root, path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    for name in ("null", "zero", "random", "urandom"):
        _bind(root, f"/dev/{name}", ATTR_RDONLY | ATTR_NOSUID | ATTR_NOEXEC)
    for name in ("tmp", "proc"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
    mount("tmpfs", f"{root}/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"size={limits['disk_bytes']},nr_inodes=1024,mode=1777")
    try:
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    except SetupError:  # older than Linux 5.8
        mount("proc", f"{root}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    restrict(f"{root}/proc", ATTR_RDONLY, recursive=False)
    restrict(root, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, recursive=False)
    os.chdir(root)
    _call("pivot_root", libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."))
    _call("umount", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    with open("/tmp/answer.py", "w", encoding="utf-8", errors="replace") as file:
        file.write(job["code"])


def _bind(root: str, path: str, attributes: int) -> None:
    inside = root + path
    if not os.path.lexists(path) or os.path.lexists(inside):
        return
    os.makedirs(os.path.dirname(inside), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), inside)
        return
    if os.path.isdir(path):
        os.mkdir(inside)
    else:
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY))
    mount(path, inside, None, MS_BIND | MS_REC)
    restrict(inside, attributes)


def filter_calls() -> None:
    """Refuses, with EPERM, sockets and what widens what the kernel shows: new namespaces, mounts, tracing, keys, modules."""
    machine = platform.machine()
    load, equal, greater, test, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown, kill = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
    lines = [(load, 0, 0, 4), (equal, 1, 0, AUDIT_ARCH[machine]), (end, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(greater, 0, 1, 0x40000000), (end, 0, 0, unknown)]  # x32's numbers
    for number in (*REFUSED[machine], *REFUSED_EVERYWHERE):
        lines += [(equal, 0, 1, number), (end, 0, 0, refuse)]
    lines += [(equal, 0, 1, CLONE3), (end, 0, 0, unknown)]  # its flags cannot be looked at: libraries then take clone
    lines += [(equal, 0, 3, CLONE[machine]), (load, 0, 0, 16), (test, 0, 1, NEW_ANY), (end, 0, 0, refuse), (end, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *line) for line in lines)
    held = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(held))
    _call("no new privileges", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call("seccomp", libc.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def become_answer(job: Job, is_root: bool, word: int, result: int, errors: int) -> None:
    """Give everything away, then run the answer in this process."""
    null = os.open("/dev/null", os.O_RDWR)
    os.setsid()
    for source, target in ((word, 0), (null, 1), (errors, 2)):
        os.dup2(source, target)
    kept = os.dup2(result, 3)
    os.closerange(4, 4096)
    os.chdir("/tmp")
    if is_root:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    nothing = ctypes.create_string_buffer(struct.pack("6I", 0, 0, 0, 0, 0, 0))
    _call("capset", libc.capset(struct.pack("Ii", 0x20080522, 0), nothing))
    limits = job["limits"]
    for name, value in (
        ("CPU", limits["cpu_s"]),
        ("AS", limits["memory_bytes"]),
        ("NPROC", limits["processes"]),
        ("FSIZE", limits["disk_bytes"]),
        ("NOFILE", limits["open_files"]),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value + (name == "CPU")))
    os.umask(0o077)
    filter_calls()
    os.execve(job["python"], [job["python"], "-I", "-B", "-c", RUNNER, str(kept)], {"PATH": "/usr/bin", "LC_ALL": "C.UTF-8"})


class Warden:
    """Process 1 of the namespace: watches, and ends it."""

    def __init__(self, job: Job, is_root: bool) -> None:
        self.job, self.limits, self.is_root = job, job["limits"], is_root
        self.peak_bytes, self.cpu_s = 0, 0.0
        self.said, self.told = b"", b""

    def run(self) -> Job:
        """What came of the answer."""
        word_out, word_in = os.pipe()
        result_out, result_in = os.pipe()
        errors_out, errors_in = os.pipe()
        os.write(word_in, self.job["word"].encode())
        os.close(word_in)
        began = time.monotonic()
        answer = os.fork()
        if answer == 0:
            try:
                become_answer(self.job, self.is_root, word_out, result_in, errors_in)
            except OSError as error:
                os.write(2, f"setup: {error}".encode())
            os._exit(125)
        for each in (word_out, result_in, errors_in):
            os.close(each)
        outcome = self._watch(answer, began, {result_out: "told", errors_out: "said"})
        passed = outcome == "ended" and self.told == self.job["word"].encode()
        return {
            "outcome": "passed" if passed else outcome,
            "wall_s": time.monotonic() - began,
            "cpu_s": self.cpu_s,
            "peak_bytes": self.peak_bytes,
            "said": self.said.decode(errors="replace")[-MOST_KEPT:],
        }

    def _watch(self, answer: int, began: float, pipes: dict[int, str]) -> str:
        """How it ended: "ended", "time", "cpu", "memory"."""
        for pipe in pipes:
            os.set_blocking(pipe, False)
        outcome = ""
        while not outcome:
            select.select(list(pipes), (), (), TICK_S)
            self._look()
            if (status := self._status_of(answer)) is not None:
                outcome = "cpu" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU else "ended"
            elif time.monotonic() - began > self.limits["wall_s"]:
                outcome = "time"
            elif self.cpu_s > self.limits["cpu_s"]:
                outcome = "cpu"
            elif self.peak_bytes > self.limits["memory_bytes"]:
                outcome = "memory"
            for pipe in list(pipes):
                self._drain(pipe, pipes)
        return outcome

    def _drain(self, pipe: int, pipes: dict[int, str]) -> None:
        try:
            data = os.read(pipe, 65536)
        except BlockingIOError:
            return
        if not data:
            del pipes[pipe]
        elif pipes[pipe] == "told":
            self.told = (self.told + data)[:128]
        else:
            self.said = (self.said + data)[-MOST_KEPT:]

    @staticmethod
    def _status_of(answer: int) -> int | None:
        """How it ended; None while it runs. Also takes in orphans."""
        process, status = -1, 0
        while process:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == answer:
                return status
        return None

    def _look(self) -> None:
        """Memory and processor time of all processes in here but this one."""
        num_bytes, ticks = 0, 0
        for name in os.listdir("/proc"):
            if not name.isdecimal() or name == "1":
                continue
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
                with open(f"/proc/{name}/status", "rb") as file:
                    told = file.read()
                num_bytes += sum(1024 * int(line.split()[1]) for line in told.splitlines() if line.startswith(OWN))
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.peak_bytes = max(self.peak_bytes, num_bytes)
        self.cpu_s = max(self.cpu_s, ticks / os.sysconf("SC_CLK_TCK") + ended.ru_utime + ended.ru_stime)


OWN = (b"RssAnon:", b"RssShmem:", b"VmSwap:")


def warden(job: Job, is_root: bool) -> Job:
    """In process 1."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        libc.sethostname(b"answer", 6)
        build_tree(job)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        return Warden(job, is_root).run()
    except OSError as error:
        return {"outcome": "setup", "said": str(error)}


def main() -> None:
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    job, is_root = json.load(sys.stdin), os.geteuid() == 0
    try:
        if platform.machine() not in AUDIT_ARCH:
            raise SetupError(1, f"a processor of kind {platform.machine()}")
        enter_namespaces()
    except OSError as error:
        print(json.dumps({"outcome": "setup", "said": str(error)}))
        return
    process = os.fork()
    if process == 0:
        told = json.dumps(warden(job, is_root)).encode()
        os.write(1, told)
        os._exit(0)
    os.waitpid(process, 0)


if __name__ == "__main__":
    main()

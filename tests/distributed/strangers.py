"""Somebody who calls all ranks that listen, for tests: `python strangers.py MODE USER SECONDS`.

No torch here: it starts at once. MODE is what it does with a connection; USER is whom it runs as, -1: as it is started.
"""

import contextlib
import os
import socket
import struct
import sys
import time

MODES = ("silent", "garbage", "close", "wrong secret", "many")


def listening():
    with open("/proc/net/unix") as table:
        return [line.split("@", 1)[1].strip() for line in table if "@ringopt-" in line and " 00010000 " in line]


def call(name, mode, kept):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(1)
    sock.connect("\0" + name)
    if mode == "close":
        sock.close()
        return
    kept.append(sock)
    if mode == "garbage":
        sock.send(b"x" * 7)
    elif mode == "wrong secret":
        sock.send(struct.pack("<Q32s", 1 + len(kept) % 2, os.urandom(32)).ljust(16417, b"\0"))


def main():
    mode, user, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    if user >= 0:
        os.setgid(user)
        os.setuid(user)
    until, calls, kept = time.monotonic() + seconds, {}, []
    print("ready", flush=True)
    while time.monotonic() < until:
        for name in listening():
            for _ in range(200 if mode == "many" else 3):
                if calls.get(name, 0) < (400 if mode == "many" else 3):
                    with contextlib.suppress(OSError):
                        call(name, mode, kept)
                    calls[name] = calls.get(name, 0) + 1
                    print(sum(calls.values()), flush=True)  # at once: a call may wait for a second
        time.sleep(0.002)


if __name__ == "__main__":
    main()

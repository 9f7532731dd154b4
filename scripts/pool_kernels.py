#!/usr/bin/env python3
"""Makes a folder of compiled kernels smaller, for a wheel: kernels share many runs of instructions.

pool_kernels.py FOLDER

Entries that `pullback compile --output FOLDER` wrote become lists of blocks of one file, "pool", as
src/cuda/disk_cache.hpp tells. A run of blocks is shared where a kernel before has the first 16. The
pool lies in planes of two bytes of each block, of which deflate makes a tenth less.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

BLOCK, PART = 16, 2
RUN = 16 * BLOCK  # shorter ones save nothing that their lists do not cost, and take longer to load
HEADER = struct.Struct("<8sQQQ")  # magic, bytes of the key and of the payload, checksum of both


def main() -> None:
    folder = Path(sys.argv[1])
    entries = []
    for path in folder.glob("*.pbk"):
        entry = path.read_bytes()
        magic, key_bytes, _, _ = HEADER.unpack_from(entry)
        if magic != b"PBKCACH1":
            sys.exit(f"{path}: not a kernel, or pooled already")
        start = HEADER.size + key_bytes
        entries.append((entry[HEADER.size : start], path, entry[:start], entry[start:]))

    pool = bytearray()
    places: dict[bytes, int] = {}  # of runs in the pool
    for _, path, head, payload in sorted(entries):
        payload += bytes(-len(payload) % BLOCK)
        extents: list[list[int]] = []
        fresh = len(pool)  # where the blocks begin that this kernel has added since its last run
        at = 0
        while at < len(payload):
            found = places.get(payload[at : at + RUN])
            if found is not None:
                length = RUN
                while pool[found + length : found + length + BLOCK] == payload[
                    at + length : at + length + BLOCK
                ] and at + length < len(payload):
                    length += BLOCK
                extents.append([found // BLOCK, length // BLOCK])
                at += length
                fresh = len(pool)
                continue
            if fresh == len(pool):
                extents.append([fresh // BLOCK, 0])
            pool += payload[at : at + BLOCK]
            extents[-1][1] += 1
            at += BLOCK
            if len(pool) - fresh >= RUN:
                places.setdefault(bytes(pool[-RUN:]), len(pool) - RUN)
        path.write_bytes(
            HEADER.pack(b"PBKPOOL2", *HEADER.unpack_from(head)[1:])
            + head[HEADER.size :]
            + b"".join(struct.pack("<II", *extent) for extent in extents)
        )
    parts = memoryview(pool).cast("H")
    planes = [parts[at :: BLOCK // PART].tobytes() for at in range(BLOCK // PART)]
    (folder / "pool").write_bytes(b"".join(planes))


if __name__ == "__main__":
    main()

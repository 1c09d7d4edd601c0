"""The structures of lane.h. What each field means is written there."""

import ctypes
from ctypes import (
    POINTER,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_size_t,
    c_uint8,
    c_uint32,
    c_uint64,
    c_void_p,
)

HEADER_BYTES = 64
# No member, node or chunk.
NONE = 2**32 - 1

# The `why` of a failure.
NO_MEMORY, CLOSED, ERROR, UNEXPECTED, DAMAGED, NO_TAG, POLL, NO_TREE = range(8)

# tag(member, incoming, header, payload, bytes, tag) -> not 0 to fail
TAG = ctypes.CFUNCTYPE(c_int, c_uint32, c_int, c_void_p, c_void_p, c_size_t, c_void_p)


class Region(ctypes.Structure):
    _fields_ = [("divisor", c_double), ("result", c_void_p), ("first", c_uint64), ("dtype", c_int32)]


class Chunk(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("region", c_uint32)]


class Node(ctypes.Structure):
    _fields_ = [("owner", c_uint32), ("single", c_uint32), ("pieces", c_uint32)]


class Kept(ctypes.Structure):
    _fields_ = [
        ("program", c_void_p),
        ("steps", c_uint32),
        ("single", c_uint32),
        ("at", POINTER(c_void_p)),
    ]


class Piece(ctypes.Structure):
    _fields_ = [("offset", c_uint64), ("size", c_uint64), ("at", c_void_p)]


class Member(ctypes.Structure):
    _fields_ = [
        ("fd", c_int32),
        ("chunks_size", c_uint32),
        ("nodes_size", c_uint32),
        ("chunks", POINTER(Chunk)),
        ("nodes", POINTER(c_uint32)),
        ("partials_in", c_void_p),
        ("results_in", c_void_p),
        ("partials_out", c_void_p),
        ("progress_in", c_void_p),
    ]


class Secret(ctypes.Structure):
    _fields_ = [("key", c_char_p), ("count", POINTER(c_uint64))]


class Plan(ctypes.Structure):
    _fields_ = [
        ("me", c_uint32),
        ("members_size", c_uint32),
        ("nodes_size", c_uint32),
        ("kept_size", c_uint32),
        ("steps", c_uint32),
        ("tag_bytes", c_uint32),
        ("window", c_uint32),
        ("in_place", c_uint32),
        ("abort_fd", c_int32),
        ("pending_bytes", c_uint64),
        ("chunk_bytes", c_uint64),
        ("members", POINTER(Member)),
        ("regions", POINTER(Region)),
        ("nodes", POINTER(Node)),
        ("program", c_void_p),
        ("kept", POINTER(Kept)),
        ("first_piece", POINTER(c_uint32)),
        ("pieces", POINTER(Piece)),
        ("scratch", POINTER(c_void_p)),
        ("results_out", c_void_p),
        ("heeds_progress", c_uint32),
        ("secrets", POINTER(Secret)),
        ("digest", c_void_p),
        ("tag", TAG),
    ]


class Failure(ctypes.Structure):
    _fields_ = [
        ("why", c_uint32),
        ("member", c_uint32),
        ("error", c_int32),
        ("results", c_uint32),
        ("partials", c_uint32),
        ("header", c_uint8 * HEADER_BYTES),
    ]


class Look(ctypes.Structure):
    _fields_ = [("moved_s", c_double), ("owes", c_uint32), ("is_watched", c_uint32), ("is_idle", c_uint32)]


# In the order of `lane_sizes`.
ALL = (Region, Chunk, Node, Kept, Piece, Member, Secret, Plan, Failure, Look)

"""The C++ library's interface (csrc/api.cpp), declared to ctypes.

It is built when Tidemill is installed, if there is a C++ compiler, and is no Python module: it
knows nothing of Python or torch.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path


class Unavailable(RuntimeError):
    """The library was not built, or this CPU cannot run it."""


class Operand(ctypes.Structure):
    """Rows of a tensor: the program's buffer of that number or, if it is -1, `data`."""

    _fields_ = (("buffer", c_int), ("data", c_void_p), ("stride", c_int64))


class LinearOptions(ctypes.Structure):
    _fields_ = (
        ("x", Operand),
        ("norm", c_void_p),
        ("eps", c_float),
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("output", c_int),
        ("activation", c_int),
        ("out", Operand),
        ("logits", ctypes.c_bool),
    )


class KvPages(ctypes.Structure):
    """Strides are in elements of bfloat16."""

    _fields_ = (
        ("k", c_void_p),
        ("v", c_void_p),
        ("page_stride", c_int64),
        ("token_stride", c_int64),
        ("head_stride", c_int64),
        ("page_size", c_int),
    )


class AttentionShape(ctypes.Structure):
    _fields_ = (
        ("kv", KvPages),
        ("heads", c_int),
        ("kv_heads", c_int),
        ("head_dim", c_int),
        ("scale", c_float),
        ("window", c_int),
        ("softcap", c_float),
    )


class Step(ctypes.Structure):
    """A Batch's tensors, and where the logits go."""

    _fields_ = (
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("kv_slots", c_void_p),
        ("row_starts", c_void_p),
        ("contexts", c_void_p),
        ("page_table", c_void_p),
        ("table_stride", c_int64),
        ("logit_tokens", c_void_p),
        ("logits", c_void_p),
        ("tokens", c_int32),
        ("rows", c_int32),
        ("logit_count", c_int32),
    )


# csrc/gemm.h: Gemm::Output and Activation
OUTPUT_F32, OUTPUT_BF16, OUTPUT_ADD_F32, OUTPUT_GATED = range(4)
ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

# csrc/packed.h: Format
U4, U8, BF16 = range(3)

# csrc/pack.h: FileFormat
FILE_FORMATS = {
    name: number
    for number, name in enumerate(
        ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
    )
}

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "tidemill_error": (c_char_p, []),
    "tidemill_engine": (c_void_p, [c_int, c_char_p]),
    "tidemill_engine_free": (None, [c_void_p]),
    "tidemill_kernels": (c_char_p, [c_void_p]),
    "tidemill_set_few_rows": (None, [c_void_p, c_int, c_int]),
    "tidemill_measure_few_rows": (c_int, [c_void_p, POINTER(c_void_p), c_int]),
    "tidemill_packed_format": (c_int, [c_int]),
    "tidemill_weight": (c_void_p, [c_void_p, c_int, c_int64, c_int64]),
    "tidemill_weight_free": (None, [c_void_p]),
    "tidemill_pack": (None, [c_void_p, c_void_p, c_int, c_void_p, c_int64, c_int64]),
    "tidemill_program": (c_void_p, [c_void_p]),
    "tidemill_program_free": (None, [c_void_p]),
    "tidemill_buffer": (c_int, [c_void_p, c_int64]),
    "tidemill_buffer_data": (c_void_p, [c_void_p, c_int, c_int64]),
    "tidemill_embed": (c_int, [c_void_p, c_void_p, c_float, POINTER(Operand)]),
    "tidemill_linear": (c_int, [c_void_p, POINTER(LinearOptions)]),
    "tidemill_rope_write": (
        c_int,
        [
            c_void_p,
            POINTER(Operand),
            POINTER(AttentionShape),
            c_void_p,
            c_void_p,
            c_void_p,
            c_float,
        ],
    ),
    "tidemill_attention": (
        c_int,
        [c_void_p, POINTER(Operand), POINTER(AttentionShape), POINTER(Operand)],
    ),
    "tidemill_run": (c_int, [c_void_p, POINTER(Step)]),
    "tidemill_profile": (c_int, [c_void_p, POINTER(Step), POINTER(c_double)]),
}


def load() -> ctypes.CDLL:
    """The library. Raises Unavailable if it is not there."""
    found = sorted(Path(__file__).parent.glob("_native*.so"))
    if not found:
        raise Unavailable("the native CPU library was not built (no C++ compiler at install?)")
    try:
        library = ctypes.CDLL(str(found[0]))
    except OSError as error:
        raise Unavailable(f"the native CPU library does not load: {error}") from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library

"""Hot operations of a forward pass on the CPU: C++ where it was built, torch elsewhere, chosen once at import."""

from outrider.kernels.chain import Chain, ChainInputs, ChainRows, Drafted, TokenTable, build_chain
from outrider.kernels.copies import find_copy
from outrider.kernels.dispatch import (
    active_level,
    available,
    fast_calls,
    reason,
    set_threads,
    threads,
    usable_processors,
    why,
)
from outrider.kernels.ggml import encode_q8_0
from outrider.kernels.ops import (
    PackedLinear,
    add_rms_norm_,
    attention,
    pack_linear,
    pack_linear_chunks,
    rms_norm,
    rope_,
    swiglu,
)
from outrider.kernels.quantised import (
    QUANTISED_TYPES,
    BlockRows,
    QuantisedLinear,
    can_dequantise,
    can_encode,
    dequantise,
    encode_q4_0,
    pack_quantised,
    pack_quantised_rows,
)
from outrider.kernels.room import Room
from outrider.kernels.stack import CacheRows, Stack, StackLayer, build_stack
from outrider.kernels.walk import Walk, softmax
from outrider.kernels.walk_reference import Pairs

__all__ = [
    "QUANTISED_TYPES",
    "BlockRows",
    "CacheRows",
    "Chain",
    "ChainInputs",
    "ChainRows",
    "Drafted",
    "PackedLinear",
    "Pairs",
    "QuantisedLinear",
    "Room",
    "Stack",
    "StackLayer",
    "TokenTable",
    "Walk",
    "active_level",
    "add_rms_norm_",
    "attention",
    "available",
    "build_chain",
    "build_stack",
    "can_dequantise",
    "can_encode",
    "dequantise",
    "encode_q4_0",
    "encode_q8_0",
    "fast_calls",
    "find_copy",
    "pack_linear",
    "pack_linear_chunks",
    "pack_quantised",
    "pack_quantised_rows",
    "reason",
    "rms_norm",
    "rope_",
    "set_threads",
    "softmax",
    "swiglu",
    "threads",
    "usable_processors",
    "why",
]

"""Names of the dtypes that cross the compile boundary and what the compiler calls them."""

from __future__ import annotations

import cutlass

CUTLASS_DTYPE = {
    "float32": cutlass.Float32,
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
    "uint8": cutlass.Uint8,
    "int8": cutlass.Int8,
}

"""tcgen05 kernels of our own give the product that NumPy gives, and what is wrong in them is caught.

One kernel: operands come as images of shared memory by bulk copies, scales go to tensor memory by cp, A stays in
shared memory or goes through registers to tensor memory; products of some K steps, read back by ld. The images are
arranged here by the layouts' definitions in words: rows of 32, 64 or 128 bytes in which 16-byte chunks are exchanged by
the row's number, or core matrices of 8 rows of 16 bytes. Values are small dyadic numbers, so each sum is exact. The
readings of descriptors and layouts themselves are confirmed by NVIDIA's examples (docs/testing.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.machine import TroubleError, run_launch
from tests.ptx.test_instructions import Launch

TYPES = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn, "e3m2": ml_dtypes.float6_e3m2fn,
    "ue4m3": ml_dtypes.float8_e4m3fn, "ue8m0": ml_dtypes.float8_e8m0fnu,
}  # fmt: skip
BITS = {"f16": 16, "bf16": 16, "tf32": 32, "e2m1": 4, "e3m2": 6}
CODES = {"f16": 0, "bf16": 1, "tf32": 2, "e4m3": 0, "e5m2": 1, "e3m2": 4, "e2m1": 5}
SWIZZLES = {16: 0, 128: 2, 64: 4, 32: 6}
A, B, SFA, SFB = 1024, 1024 + 65536, 1024 + 131072, 1024 + 131072 + 8192  # places in shared memory
RNG = np.random.default_rng(5)


@dataclass(frozen=True)
class Product:
    """D [m, n] = A [m, k] B [n, k] transposed, with block scales where `scale` names their format."""

    kind: str = "f16"
    a: str = "f16"
    b: str = "f16"
    m: int = 128
    n: int = 16
    k: int = 64
    swizzle: int = 128
    transposed: bool = False
    in_tensor: bool = False
    by_threads: bool = False
    scale: str = ""
    to: str = "f32"
    negate: bool = False
    halvings: int = 0
    disabled: int = 0

    @property
    def id(self) -> str:
        return "-".join(str(v) for v in vars(self).values() if v not in (False, "", 0))

    @property
    def step(self) -> int:
        """K of one instruction."""
        return 64 if self.kind.startswith("mxf4") else 32 if "f8f6f4" in self.kind else 256 // BITS[self.a]

    @property
    def per(self) -> int:
        """Scales of one instruction and row."""
        return {"mxf8f6f4": 1, "mxf4": 2, "mxf4nvf4": 4}.get(self.kind, 0)

    def descriptor(self, number: int) -> int:
        """The instruction descriptor of a step."""
        codes = [1, 1] if self.kind.startswith("mxf4") else [CODES[self.a], CODES[self.b]]
        word = codes[0] << 7 | codes[1] << 10 | self.negate << 13 | (self.n >> 3) << 17 | (self.m >> 4) << 24
        word |= self.transposed << 15 | self.transposed << 16
        if not self.scale:
            return word | (self.to == "f32") << 4
        at = number * self.per % 4
        return word | at << 4 | at << 29 | (self.scale == "ue8m0") << 23


def packed(x: np.ndarray, name: str, pad: bool) -> np.ndarray:
    """Elements [rows, k] as bytes; elements of less than a byte, if `pad`, in slots of 16 bytes for 16 of them."""
    bits = BITS.get(name, 8)
    codes = x.astype(TYPES[name])
    if bits >= 8:
        return codes.view(np.uint8).reshape(len(x), -1)
    stream = np.unpackbits(codes.view(np.uint8)[..., None], axis=-1, bitorder="little")[..., :bits]
    raw = np.packbits(stream.reshape(len(x), -1), axis=-1, bitorder="little")
    if not pad:
        return raw
    slots = np.zeros((len(x), x.shape[1] // 16, 16), np.uint8)
    slots[..., : 2 * bits] = raw.reshape(len(x), -1, 2 * bits)
    return slots.reshape(len(x), -1)


def image(raw: np.ndarray, swizzle: int) -> np.ndarray:
    """Bytes [rows, width] in shared memory, K-major: tiles of `swizzle` bytes a row, or columns of core matrices."""
    rows = len(raw)
    if swizzle == 16:
        return raw.reshape(rows, -1, 16).transpose(1, 0, 2).ravel()
    tiles = raw.reshape(rows, -1, swizzle // 16, 16)
    row = np.arange(rows)
    turn = {128: row % 8, 64: row // 2 % 4, 32: row // 4 % 2}[swizzle]
    out = np.empty((tiles.shape[1], rows, swizzle // 16, 16), np.uint8)
    for chunk in range(swizzle // 16):
        out[:, row, chunk ^ turn] = tiles[:, :, chunk].transpose(1, 0, 2)
    return out.ravel()


def transposed_image(raw: np.ndarray, swizzle: int) -> np.ndarray:
    """16-bit elements [rows, k] with rows contiguous: 8 k by `swizzle` bytes of rows each, k first, then rows."""
    x = raw.view(np.uint16)
    wide = swizzle // 2
    blocks = np.ascontiguousarray(
        x.T.reshape(-1, 8, len(x) // wide, wide).transpose(2, 0, 1, 3)
    )  # [rows', k', 8, wide]
    flat = blocks.view(np.uint8).reshape(-1, swizzle)
    return flat.ravel() if swizzle == 16 else image(flat, swizzle)


def matrix_descriptor(p: Product, rows: int) -> tuple[int, int]:
    """The descriptor without its address, and how many bytes a K step is further on, if within a tile."""
    if p.transposed:
        far, near = 128 * p.k // 8 * p.swizzle // 16, 8 * p.swizzle
        lead, stride = (near, far) if p.swizzle == 16 else (far, near)
        return (lead >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | SWIZZLES[p.swizzle] << 61, 2 * near
    lead, stride = (rows * 16, 128) if p.swizzle == 16 else (16, 8 * p.swizzle)
    return (lead >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | SWIZZLES[p.swizzle] << 61, 0


def start(p: Product, rows: int, number: int) -> int:
    """Where the bytes of a K step begin in an image."""
    if p.transposed:
        return number * matrix_descriptor(p, rows)[1]
    byte = number * 32
    return byte // 16 * rows * 16 if p.swizzle == 16 else byte // p.swizzle * rows * p.swizzle + byte % p.swizzle


def wait(place: int, name: str) -> str:
    return f"{name}: mbarrier.try_wait.parity.shared::cta.b64 %p7, [smem+{place}], 0; @!%p7 bra {name};"


def multiplications(p: Product) -> list[str]:
    """One mma for each K step."""
    lines = []
    scaled = ".block_scale" if p.scale else ""
    mask = "{" + ", ".join(f"0x{p.disabled >> 32 * i & 0xFFFFFFFF:x}" for i in range(4)) + "}, "
    for number in range(p.k // p.step):
        for place, rows, d in ((A, p.m, "%d3"), (B, p.n, "%d4")):
            lines += [f"mov.u32 %r9, smem; add.u32 %r9, %r9, {place + start(p, rows, number)}; shr.u32 %r9, %r9, 4;"]
            lines += [f"cvt.u64.u32 {d}, %r9; or.b64 {d}, {d}, {matrix_descriptor(p, rows)[0]};"]
        a = "%d3"
        if p.in_tensor:
            lines += [f"add.u32 %r11, %r4, {8 * number};"]
            a = "[%r11]"
        scales = ""
        if p.scale:
            column = number * p.per // 4 * 4
            wide = -(-p.n // 128) * 4
            lines += [f"add.u32 %r12, %r5, {column}; add.u32 %r13, %r6, {column * wide // 4};"]
            scales = "[%r12], [%r13], "
        lines += [f"setp.ne.u32 %p3, {number}, 0; mov.b32 %r7, {p.descriptor(number)};"]
        last = f", {p.halvings}" if p.halvings and number else ""
        keep = mask if p.disabled and number else ""  # so that each lane has at least the first product
        lines += [f"tcgen05.mma.cta_group::1.kind::{p.kind}{scaled} [%r3], {a}, %d4, %r7, {scales}{keep}%p3{last};"]
    return lines


def body(p: Product, sizes: list[int]) -> str:
    """The kernel: parameters a0 to a3 are images of A, B and the scales, a4 rows of A in registers, a5 takes D."""
    columns = 8 * (p.k // p.step)
    lines = [
        "setp.ne.u32 %p0, %t, 0; shr.u32 %r1, %t, 5; setp.ne.u32 %p1, %r1, 0; shl.b32 %r2, %r1, 21;",
        "@%p0 bra READY; mbarrier.init.shared.b64 [smem], 1; mbarrier.init.shared.b64 [smem+8], 1;",
        "fence.mbarrier_init.release.cluster; READY:",
        "@%p1 bra HAVE; tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem+16], 512;",
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; HAVE:",
        "tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;",
        "ld.shared.b32 %r3, [smem+16]; add.u32 %r4, %r3, 256; add.u32 %r5, %r3, 384; add.u32 %r6, %r3, 448;",
    ]
    if p.in_tensor:  # thread t has row t; 8 columns a step
        regs = [f"%w{i}" for i in range(columns)]
        lines += [f".reg .b32 %w<{columns}>; mad.wide.u32 %d1, %t, {4 * columns}, %a4;"]
        lines += [f"ld.global.b32 {r}, [%d1+{4 * i}];" for i, r in enumerate(regs)]
        lines += [f"add.u32 %r8, %r4, %r2; tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [%r8], {{{', '.join(regs)}}};"]
        lines += ["tcgen05.wait::st.sync.aligned;"]
        lines += ["tcgen05.fence::before_thread_sync; bar.sync 0; tcgen05.fence::after_thread_sync;"]
    places = [(place, i) for i, place in enumerate((A, B, SFA, SFB)) if sizes[i]]
    if p.by_threads:  # A by ordinary stores, so a proxy fence is due
        del places[0]
        lines += ["mul.wide.u32 %d6, %t, 16; add.u64 %d6, %d6, %a0; shl.b32 %r14, %t, 4; mov.u32 %r16, smem;"]
        lines += ["add.u32 %r14, %r14, %r16;"]
        for at in range(0, sizes[0], 2048):
            lines += [f"ld.global.v4.b32 {{%r17, %r18, %r19, %r20}}, [%d6+{at}];"]
            lines += [f"st.shared.v4.b32 [%r14+{A + at}], {{%r17, %r18, %r19, %r20}};"]
        lines += ["fence.proxy.async.shared::cta; bar.sync 0;"]
    lines += [
        "@%p0 bra WORKED;",
        f"mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem], {sum(sizes[i] for _, i in places)};",
    ]
    for place, i in places:
        lines += [
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            f"[smem+{place}], [%a{i}], {sizes[i]}, [smem];"
        ]
    lines += [wait(0, "LOADED")]
    if p.scale:
        for word, place, size in (("%r5", SFA, sizes[2]), ("%r6", SFB, sizes[3])):
            for i in range(size // 512):
                lines += [
                    f"mov.u32 %r9, smem; add.u32 %r9, %r9, {place + 512 * i}; shr.u32 %r9, %r9, 4;",
                    "cvt.u64.u32 %d2, %r9;",
                ]
                lines += [f"or.b64 %d2, %d2, {1 << 16 | 8 << 32 | 1 << 46}; add.u32 %r10, {word}, {4 * i};"]
                lines += ["tcgen05.cp.cta_group::1.32x128b.warpx4 [%r10], %d2;"]
    lines += multiplications(p)
    lines += [
        "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [smem+8]; WORKED:",
        wait(8, "DONE"),
    ]
    out = [f"%v{i}" for i in range(p.n)]
    lines += ["tcgen05.fence::after_thread_sync; add.u32 %r8, %r3, %r2;", f".reg .b32 %v<{p.n}>;"]
    for i in range(0, p.n, 8):
        lines += [f"tcgen05.ld.sync.aligned.32x32b.x8.b32 {{{', '.join(out[i : i + 8])}}}, [%r8+{i}];"]
    lines += [f"tcgen05.wait::ld.sync.aligned; mad.wide.u32 %d5, %t, {4 * p.n}, %a5;"]
    if p.m == 64:
        lines += ["and.b32 %r15, %t, 16; setp.ne.u32 %p4, %r15, 0; @%p4 bra STORED;"]
    lines += [f"st.global.b32 [%d5+{4 * i}], {register};" for i, register in enumerate(out)]
    lines += ["STORED: tcgen05.fence::before_thread_sync; bar.sync 0;"]
    lines += ["@%p1 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r3, 512; END:"]
    return "\n".join(lines)


def module(p: Product, sizes: list[int]) -> str:
    text = ", ".join(f".param .u64 a{i}" for i in range(6))
    loads = "\n".join(f"ld.param.u64 %a{i}, [a{i}];" for i in range(6))
    return f""".version 8.8
.target sm_103a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
.visible .entry k({text})
.reqntid 128, 1, 1
{{
.reg .pred %p<8>; .reg .b32 %t, %r<32>; .reg .b64 %d<16>, %a<6>;
{loads}
mov.u32 %t, %tid.x;
{body(p, sizes)}
ret;
}}"""


def values(rows: int, k: int, name: str) -> np.ndarray:
    """Numbers that every format holds, and whose sums of products are exact."""
    return RNG.choice([-2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0, 3.0, 0.0], (rows, k))


def scale_image(scales: np.ndarray, name: str) -> np.ndarray:
    """Scales [rows, k blocks] in atoms of 128 rows by 4: 512 bytes, row % 32, then row / 32, then the 4."""
    rows, blocks = scales.shape
    padded = np.ones((-(-rows // 128) * 128, -(-blocks // 4) * 4))
    padded[:rows, :blocks] = scales
    atoms = padded.astype(TYPES[name]).view(np.uint8).reshape(-1, 4, 32, padded.shape[1] // 4, 4)
    return atoms.transpose(3, 0, 2, 1, 4).ravel()  # [k block of 4, 128 rows, row % 32, row / 32, 4]


def run(p: Product, change=str, mode: str = "early", seed: int = 0) -> np.ndarray:  # type: ignore[no-untyped-def]
    """D of a product [128 lanes, n], as its kernel, changed, computes it, next to what it must be."""
    a, b, pad = values(p.m, p.k, p.a), values(p.n, p.k, p.b), "f8f6f4" in p.kind
    raw = [packed(x, name, pad) for x, name in ((a, p.a), (b, p.b))]
    arrange = transposed_image if p.transposed else image
    images = [arrange(r, p.swizzle) for r in raw] + [np.zeros(0, np.uint8)] * 2
    truth = (-a if p.negate else a, b)
    if p.scale:
        block = p.step // p.per
        choice = [0.5, 1.0, 2.0] + ([1.5] if p.scale == "ue4m3" else [])
        scales = [RNG.choice(choice, (rows, p.k // block)) for rows in (p.m, p.n)]
        images[2:] = [scale_image(s, p.scale) for s in scales]
        truth = tuple(x * np.repeat(s, block, axis=1) for x, s in zip(truth, scales, strict=True))
    lane = np.arange(p.m) if p.m == 128 else np.arange(64) // 16 * 32 + np.arange(64) % 16
    kept = np.array([bool(p.disabled >> int(i) & 1) for i in lane])[:, None]
    d = np.zeros((p.m, p.n))
    for number in range(p.k // p.step):
        part = slice(number * p.step, (number + 1) * p.step)
        new = d * 2.0 ** -(p.halvings if number else 0) + truth[0][:, part] @ truth[1][:, part].T
        d = np.where(kept & (number > 0), d, new)
    rows_in_registers = raw[0].copy() if p.in_tensor else np.zeros(16, np.uint8)
    if p.in_tensor:
        images[0] = np.zeros(0, np.uint8)
    sizes = [len(x) for x in images]
    out = np.full((128, p.n), 7, np.uint32)
    buffers = [x if len(x) else np.zeros(16, np.uint8) for x in images] + [rows_in_registers, out]
    launch = Launch(
        change(module(p, sizes)), [x.ctypes.data.to_bytes(8, "little") for x in buffers], (128, 1, 1), 160 << 10
    )
    run_launch(launch, buffers, mode=mode, seed=seed)  # type: ignore[arg-type]
    got = out.astype(np.uint16).view(np.float16) if p.to == "f16" else out.view(np.float32)
    return got[lane].astype(np.float64) - d


NARROW = Product("f8f6f4", "e4m3", "e5m2", k=128)
NVFP4 = Product("mxf4nvf4", "e2m1", "e2m1", k=256, scale="ue4m3")
PRODUCTS = (
    Product(),
    Product(swizzle=64, a="bf16", b="bf16", n=24),
    Product(swizzle=32, m=64, n=8),
    Product(swizzle=16, n=256, k=32),
    Product(transposed=True, n=64),
    Product(transposed=True, swizzle=16, n=64),
    Product(transposed=True, swizzle=64, n=64, k=32),
    Product(in_tensor=True, k=128),
    Product(by_threads=True),
    Product(to="f16", negate=True),
    Product(halvings=1),
    Product(disabled=0xF0F0 << 64 | 0xFFFF),
    Product("tf32", "tf32", "tf32", k=64),
    Product("tf32", "tf32", "tf32", in_tensor=True, k=32),
    NARROW,
    Product("f8f6f4", "e2m1", "e3m2", swizzle=64),
    Product("mxf8f6f4", "e4m3", "e2m1", k=256, scale="ue8m0", n=40),
    Product("mxf4", "e2m1", "e2m1", k=256, scale="ue8m0", n=136),
    NVFP4,
    replace(NVFP4, n=48, k=128, swizzle=64),
)  # fmt: skip


@pytest.mark.parametrize("product", PRODUCTS, ids=lambda p: p.id)
def test_a_product_is_exact(product: Product) -> None:
    for mode, seed in (("early", 0), ("late", 1)):
        assert (run(product, mode=mode, seed=seed) == 0).all()


@pytest.mark.parametrize("threads", [0, 5, 31])
def test_fragments_are_those_of_the_figures(threads: int) -> None:
    """Tensor memory of known contents, lane * 1000 + column, read in every shape by one thread ("Matrix fragments")."""
    row, pair = threads // 4, threads % 4
    expected = {
        "32x32b.x4": [1000 * threads + c for c in range(4)],
        "16x64b.x2": [1000 * (row + 8 * (threads % 2)) + threads // 2 % 2 + c for c in (0, 2)],
        "16x128b.x2": [1000 * (row + r) + pair + c for c in (0, 4) for r in (0, 8)],
        "16x256b.x1": [1000 * (row + r) + 2 * pair + c for r in (0, 8) for c in (0, 1)],
        "32x32b.x2.pack::16b": [1000 * threads + c & 0xFFFF | 1000 * threads + c + 1 << 16 for c in (0, 2)],
    }
    for shape, words in expected.items():
        registers = ", ".join(f"%r{10 + i}" for i in range(len(words)))
        text = f"""
            tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32;
            ld.shared.b32 %r1, [smem]; mul.lo.u32 %r2, %t, 1000;
            add.u32 %r3, %r2, 1; add.u32 %r4, %r2, 2; add.u32 %r5, %r2, 3;
            add.u32 %r6, %r2, 4; add.u32 %r7, %r2, 5; add.u32 %r8, %r2, 6; add.u32 %r9, %r2, 7;
            tcgen05.st.sync.aligned.32x32b.x8.b32 [%r1], {{%r2, %r3, %r4, %r5, %r6, %r7, %r8, %r9}};
            tcgen05.wait::st.sync.aligned;
            tcgen05.ld.sync.aligned.{shape}.b32 {{{registers}}}, [%r1]; tcgen05.wait::ld.sync.aligned;
            mad.wide.u32 %d1, %t, {4 * len(words)}, %a5;
            {" ".join(f"st.global.b32 [%d1+{4 * i}], %r{10 + i};" for i in range(len(words)))}
            tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r1, 32;"""
        out = np.zeros((32, len(words)), np.uint32)
        kernel = module(Product(), [16] * 4)
        kernel = kernel[: kernel.index("mov.u32 %t, %tid.x;") + 19] + text + "ret; }"
        arguments = [out.ctypes.data.to_bytes(8, "little")] * 6
        run_launch(Launch(kernel.replace(".reqntid 128", ".reqntid 32"), arguments), [out], mode="late")
        assert out[threads].tolist() == words, shape


# Teeth.


def drop(pattern: str, which: int = 0, by: str = ""):  # type: ignore[no-untyped-def]
    """A fault: the match number `which` of a pattern is not there, or something else."""

    def change(ptx: str) -> str:
        found = list(re.finditer(pattern, ptx))[which]
        return ptx[: found.start()] + found.expand(by) + ptx[found.end() :]

    return change


AFTER, BEFORE, BARRIER = r"tcgen05\.fence::after_thread_sync;", r"tcgen05\.fence::before_thread_sync;", r"bar\.sync 0;"
PLAIN, IN_TENSOR, BY_THREADS = Product(), Product(in_tensor=True, k=128), Product(by_threads=True)


def described(bits: int, product: Product = PLAIN):  # type: ignore[no-untyped-def]
    """A fault: the first instruction descriptor has other bits."""
    word = product.descriptor(0)
    return drop(f"%r7, {word}", 0, f"%r7, {word + bits}")


def laid_out(kind: int, fixed: int = 1):  # type: ignore[no-untyped-def]
    """A fault: matrix descriptors have another swizzle, or another fixed field."""
    word = matrix_descriptor(PLAIN, 16)[0]
    other = word & ~(7 << 61 | 1 << 46) | kind << 61 | fixed << 46
    return lambda ptx: ptx.replace(str(word), str(other))


def allocates(columns: int):  # type: ignore[no-untyped-def]
    """A fault: other columns are allocated, and freed."""
    return lambda ptx: re.sub(r"(alloc\S* (?:\[smem\+16\]|%r3)), 512", rf"\1, {columns}", ptx)


# The product, its fault, and how the report begins; "wrong" for a wrong product without one.
FAULTS = {
    "no barrier behind the allocation": (PLAIN, drop(BARRIER), "uninitialised: shared|race: shared"),
    "no fence of the mbarriers": (PLAIN, drop(r"fence\.mbarrier_init\S*;"), "missing_fence"),
    "no wait for the copies": (PLAIN, drop(r"@!%p7 bra LOADED;"), "race: shared|uninitialised: shared"),
    "no commit": (PLAIN, drop(r"tcgen05\.commit\S* \S*;"), "deadlock"),
    "no wait for the products": (PLAIN, drop(r"@!%p7 bra DONE;"), "race: tensor memory|uninitialised"),
    "no wait for the loads": (PLAIN, drop(r"tcgen05\.wait::ld\S*;"), "missing_wait"),
    "no barrier before it is freed": (PLAIN, drop(BARRIER, -1), "race: tensor memory|out_of_bounds: tensor"),
    "tensor memory not freed": (PLAIN, drop(r"tcgen05\.dealloc\S* %r3, 512;"), "leak"),
    "half of it freed": (PLAIN, drop(r"(dealloc\S* %r3), 512", 0, r"\1, 256"), "tensor: frees 256"),
    "too little allocated": (IN_TENSOR, allocates(32), "out_of_bounds: tensor"),
    "a copy of 16 bytes less": (PLAIN, drop(r"(\[%a1\]), 2048", 0, r"\1, 2032"), "deadlock"),
    "8 columns too many": (PLAIN, described(1 << 17), "uninitialised: shared"),
    "a negated operand": (PLAIN, described(1 << 14), "wrong"),
    "another swizzle": (PLAIN, laid_out(4), "wrong"),
    "a field that must be 1": (PLAIN, laid_out(2, 0), "descriptor"),
    "a K step too far": (PLAIN, drop(rf"add\.u32 %r9, %r9, {A + 32};", 0, f"add.u32 %r9, %r9, {A + 64};"), "wrong"),
    "the first product adds": (PLAIN, drop(r"setp\.ne(\.u32 %p3, 0, 0;)", 0, r"setp.eq\1"), "uninitialised: tensor"),
    "a warp in another's lanes": (PLAIN, drop(r"add\.u32 %r8, %r3, %r2;", -1, "mov.u32 %r8, %r3;"), "tensor: lane"),
    "every thread multiplies": (PLAIN, drop(r"@%p0 bra WORKED;"), "deadlock|tensor|mbarrier"),
    "no wait for the stores": (IN_TENSOR, drop(r"tcgen05\.wait::st\S*;"), "race: tensor memory|uninitialised: tensor"),
    "no fence before the barrier": (IN_TENSOR, drop(BEFORE, 1), "race: tensor memory"),
    "no fence behind the barrier": (IN_TENSOR, drop(AFTER, 1), "race: tensor memory"),
    "no barrier behind the stores": (IN_TENSOR, drop(BARRIER, 1), "race: tensor memory|uninitialised: tensor"),
    "no proxy fence": (BY_THREADS, drop(r"fence\.proxy\.async\S*;"), "race: shared"),
    "no barrier behind the proxy fence": (BY_THREADS, drop(BARRIER, 1), "race: shared|uninitialised: shared"),
    "a scale not copied": (NVFP4, drop(r"tcgen05\.cp\S* \[%r10\], %d2;", 1), "uninitialised: tensor"),
    "scales of another block": (NVFP4, drop(r"add\.u32 %r12, %r5, 4;", 0, "add.u32 %r12, %r5, 0;"), "wrong"),
    "scales to one group of lanes": (NVFP4, drop(r"\.warpx4"), "syntax|unmodelled|uninitialised: tensor"),
    "exponents as scales": (NVFP4, described(1 << 23, NVFP4), "wrong"),
}  # fmt: skip


def caught(product: Product, change, seed: int) -> str:  # type: ignore[no-untyped-def]
    try:
        return "" if (run(product, change, "late", seed) == 0).all() else "wrong"
    except TroubleError as trouble:
        return str(trouble)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str) -> None:
    product, change, beginning = FAULTS[fault]
    assert caught(product, str, 0) == ""
    for seed in range(3):
        found = caught(product, change, seed)
        assert re.match(beginning, found), found

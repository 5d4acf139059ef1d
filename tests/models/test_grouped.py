"""Products of tiles with their experts' kernels: loops and GPU kernels against one product for each expert."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_gpu import printed
from tiers import tiers

from jaxpipe.models import grouped_kernels
from jaxpipe.models.grouped import grouped

# Tiles, rows of one, inputs, outputs, and the tiles of each expert; the others have none. An expert may have no tile.
SHAPES = {
    "small": (5, 16, 32, 48, (2, 0, 2)),
    "tiles of eight rows": (9, 8, 32, 48, (3, 0, 5)),
    "tiles of 24 rows, the last expert has none": (7, 24, 32, 48, (2, 3, 0)),
    "all tiles used": (4, 32, 64, 16, (1, 3)),
    "many blocks of rows": (5, 256, 32, 256, (4,)),
    "more blocks than neighbours": (19, 16, 16, 144, (1, 9, 0, 8)),
}


def arrays(shape, dtype, *, idle):
    """Rows, kernels, gradients and expert of a shape; rows and gradients of tiles of no expert are times `idle`."""
    num_tiles, size, depth, width, tiles_of = shape
    rng = np.random.default_rng(0)
    expert = np.repeat(np.arange(len(tiles_of)), tiles_of)
    expert = np.append(expert, [len(tiles_of)] * (num_tiles - len(expert))).astype(np.int32)
    factor = np.where(expert < len(tiles_of), 1.0, idle)[:, None, None]
    rows, d = (factor * rng.standard_normal((num_tiles, size, each)) for each in (depth, width))
    kernels = rng.standard_normal((len(tiles_of), depth, width))
    return *(jnp.asarray(each, dtype) for each in (rows, kernels, d)), jnp.asarray(expert)


def textbook(rows, kernels, expert, d):
    """Products and gradients in float64, an expert at a time."""
    rows, kernels, d = (np.asarray(each, np.float64) for each in (rows, kernels, d))
    y, d_rows, d_kernels = np.zeros(d.shape), np.zeros(rows.shape), np.zeros(kernels.shape)
    for own, kernel in enumerate(kernels):
        its = np.asarray(expert) == own
        y[its], d_rows[its] = rows[its] @ kernel, d[its] @ kernel.T
        d_kernels[own] = np.einsum("tri,tro->io", rows[its], d[its])
    return y, d_rows, d_kernels


def apart(found, expected):
    pairs = zip(found, expected, strict=True)
    return [float(np.abs(np.asarray(f, np.float64) - e).max() / np.abs(e).max()) for f, e in pairs]


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("has_idle_tiles", [False, True])
def test_loops_are_the_textbooks(name, has_idle_tiles):
    rows, kernels, d, expert = arrays(SHAPES[name], jnp.float32, idle=0.0)

    @jax.jit
    def found(rows, kernels, d):
        y, vjp = jax.vjp(lambda rows, kernels: grouped(rows, kernels, expert, has_idle_tiles), rows, kernels)
        return y, *vjp(d)

    assert max(apart(found(rows, kernels, d), textbook(rows, kernels, expert, d))) < 1e-5


@pytest.mark.parametrize("name", tiers(list(SHAPES)[::2], ci=list(SHAPES)[1::2]))
def test_kernels_are_the_textbooks(name):
    """Interpreted: the same blocks in the same order, on a CPU. What tiles of no expert hold changes nothing."""
    rows, kernels, d, expert = arrays(SHAPES[name], jnp.bfloat16, idle=np.nan)
    assert grouped_kernels.fit(rows, kernels)
    # Kernels of other layers around them are not read.
    stack = np.pad(kernels, [(1, 1), (0, 0), (0, 0)], constant_values=np.nan)

    @jax.jit
    def all_four(rows, kernels, stack, d, totals):
        given = {"num_experts": len(kernels), "interpret": True}
        return (
            grouped_kernels.products(rows, kernels, expert, **given),
            grouped_kernels.products(d, stack, expert, 1, transposed=True, **given),
            grouped_kernels.sums(rows, d, expert, **given),
            grouped_kernels.added_sums(totals, rows, d, expert, 1, **given),
        )

    *found, added = all_four(rows, kernels, stack, d, np.ones(stack.shape, np.float32))
    assert (added[0] == 1).all()
    assert (added[-1] == 1).all()
    assert max(apart((added[1:-1],), (1 + textbook(rows, kernels, expert, d)[2],))) < 1e-6  # float32, never rounded
    assert max(apart(found, textbook(rows, kernels, expert, d))) < 4e-3  # half of bfloat16's last digit: 2**-9


def test_every_block_of_the_result_is_made_once():
    for grid in ((1, 1), (8, 3), (9, 2), (23, 5)):
        places = {tuple(map(int, grouped_kernels._place(jnp.int32(i), *grid))) for i in range(grid[0] * grid[1])}
        assert places == {(row, column) for row in range(grid[0]) for column in range(grid[1])}


@pytest.mark.parametrize(
    ("rows", "kernels", "dtype", "fits"),
    [
        ((4, 32, 64), (2, 64, 48), "bfloat16", True),
        ((4, 32, 64), (2, 64, 48), "float32", False),
        ((4, 8, 64), (2, 64, 48), "bfloat16", True),
        ((1, 8, 64), (2, 64, 48), "bfloat16", False),
        ((4, 32, 24), (2, 24, 48), "bfloat16", False),
        ((4, 32, 64), (2, 64, 40), "bfloat16", False),
    ],
)
def test_what_kernels_do_not_take_is_left_to_loops(rows, kernels, dtype, fits):
    assert grouped_kernels.fit(*(jax.ShapeDtypeStruct(shape, dtype) for shape in (rows, kernels))) is fits


COMPILE = """
import json, re, sys
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus

mesh_devices = absent_gpus(parse_topology(sys.argv[1] + ":1x1"))
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jaxpipe.models.grouped import grouped

mesh = Mesh(np.array(mesh_devices), ("all",))

def products(rows, kernels, expert, d):
    y, vjp = jax.vjp(lambda rows, kernels: grouped(rows, kernels, expert, True), rows, kernels)
    return y, *vjp(d)

def of(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

mapped = jax.jit(jax.shard_map(products, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
half = jnp.bfloat16
num, size = 40, int(sys.argv[2])
arrays = of(half, num, size, 512), of(half, 8, 512, 1536), of(jnp.int32, num), of(half, num, size, 1536)
text = mapped.lower(*arrays).compile().as_text()
print(json.dumps({"kernels": text.count("__gpu$xla.gpu.triton"), "loops": len(re.findall(r" while\\(", text)),
                  "branches": len(re.findall(r" conditional\\(", text))}))
"""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("a100-80g", 8, marks=pytest.mark.slow),
        pytest.param("h100-80g", 128, marks=pytest.mark.ci),
        pytest.param("a100-80g", 128, marks=pytest.mark.slow),
        pytest.param("h100-80g", 8, marks=pytest.mark.slow),
    ],
)
def test_on_a_gpu_they_are_three_kernels(name, size):
    assert printed(COMPILE, name, str(size)) == {"kernels": 3, "loops": 0, "branches": 0}

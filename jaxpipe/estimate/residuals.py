"""How many bytes does one layer keep of one microbatch: forward for the backward, and I for its W?

Goes in: a setting. Comes out: every array by its name, on one device; `tests/estimate/test_kept_by_formula.py`
holds them against what the layer's own vjp keeps. Left to others: for how long (`counts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.estimate.setting import Setting

ITEMSIZE = {"float32": 4, "bfloat16": 2}
Arrays = dict[str, int]  # name -> numbers


@dataclass(frozen=True)
class Sizes:
    """Numbers of the arrays of one layer and microbatch on one device.

    Attributes:
        stream: "batch local_seq hidden", split along the sequence over `tensor`.
        queries: "batch seq local_head head_dim", so the attended values.
        keys: of the local key-value heads, so the values.
        width: "batch seq local_width", between the products of the feed forward.
        scores: "batch local_head seq seq".
        rows: "batch local_head seq", of queries.
    """

    stream: int
    queries: int
    keys: int
    width: int
    scores: int
    rows: int


def sizes(setting: Setting) -> Sizes:
    """Sizes of the arrays of `setting`."""
    anatomy, tensor = setting.anatomy, setting.tensor
    num_tokens = setting.microbatch_size * setting.seq_len
    rows = num_tokens * (anatomy.num_heads // tensor)
    return Sizes(
        stream=num_tokens * anatomy.hidden // tensor,
        queries=rows * anatomy.head_size,
        keys=num_tokens * (anatomy.num_kv_heads // tensor) * anatomy.head_size,
        width=num_tokens * anatomy.width // tensor,
        scores=rows * setting.seq_len,
        rows=rows,
    )


@dataclass(frozen=True)
class LayerKeeps:
    """What one layer keeps of one microbatch.

    Attributes:
        itemsize: bytes of a number, but for those of `float32`.
        residuals: that forward keeps, by name.
        float32: names of residuals that are float32 whatever the layer computes in.
        for_weights: names of the residuals that W reads; I alone needs the others.
        left: what I leaves for W, by name.
    """

    itemsize: int
    residuals: Arrays
    float32: tuple[str, ...]
    for_weights: tuple[str, ...]
    left: Arrays

    @property
    def page_bytes(self) -> int:
        """Of the residuals: one page."""
        return sum(self._bytes(name, size) for name, size in self.residuals.items())

    @property
    def left_bytes(self) -> int:
        """Of what I leaves."""
        return self.itemsize * sum(self.left.values())

    @property
    def apart_bytes(self) -> int:
        """Of what I leaves, the part that has no room in the place of the residuals that W does not read.

        Source: `jaxpipe.program.storage`: of the arrays, those that fill the room best.
        """
        room = sum(
            size
            for name, size in self.residuals.items()
            if name not in self.for_weights and self._bytes(name, size) == self.itemsize * size
        )
        sums = {0}
        for size in self.left.values():
            sums |= {total + size for total in sums if total + size <= room}
        return self.left_bytes - self.itemsize * max(sums)

    def _bytes(self, name: str, size: int) -> int:
        return size * (4 if name in self.float32 else self.itemsize)


def layer_keeps(setting: Setting, *, recompute: str | None = None) -> LayerKeeps:
    """What a layer of `setting` keeps.

    Args:
        setting: of one step.
        recompute: in place of the model's own.

    What is cheap to compute from the arrays here (norms, activations, the gathered stream, dropout's masks) is
    computed again. Between F and B, with stream x, queries q, keys and values k, width w, rows r:

        recompute full                x
        attention chunked, cudnn      2 x + 2 q + 2 k + w (2 w where gated), and the log-sum-exp of r rows, float32
        attention xla                 the same with scores in place of r; recompute attention: with neither

    Source: Korthikanti et al., MLSys 2023, section 4.2, for what stays; the arrays are those of `jaxpipe.models.block`.
    """
    recompute = recompute or setting.model.recompute
    of, full = sizes(setting), recompute == "full"
    ups = {f"input {i} of the activation": of.width for i in range(setting.anatomy.num_up)}
    between = {} if setting.anatomy.parallel else {"stream between": of.stream}
    residuals = {"input": of.stream}
    if not full:
        residuals |= {
            "queries": of.queries,
            "keys": of.keys,
            "values": of.keys,
            "attended": of.queries,
            **between,
            **ups,
        }
        if setting.model.attention != "xla":
            residuals["log-sum-exp"] = of.rows
        elif recompute == "none":
            residuals["probabilities"] = of.scores
    left = {
        "gradient of the output": of.stream,
        "activated": of.width,
        **{f"gradient of {name}": size for name, size in ups.items()},
        "normed stream between": of.stream,
        **{f"gradient of {name}": size for name, size in between.items()},
        "gradient of queries, keys and values": of.queries + 2 * of.keys,
        "normed input": of.stream,
        **({"attended": of.queries} if full else {}),
    }
    return LayerKeeps(
        itemsize=ITEMSIZE[setting.dtype],
        residuals=residuals,
        float32=("log-sum-exp",),
        for_weights=() if full else ("attended",),
        left=left,
    )

"""Bytes that one layer saves for one microbatch: forward for the backward, and I for its W.

Goes in: a setting. Comes out: every array by its name, on one device; `tests/estimate/test_kept_by_formula.py`
compares them with what the layer's own vjp saves. Left to others: lifetimes (`counts`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpipe.cluster.axes import EXPERT_AXES
from jaxpipe.estimate.setting import Setting
from jaxpipe.mesh.collectives import Axis
from jaxpipe.models.dispatch import Dispatch, dispatch_of
from jaxpipe.models.experts import CHOSEN

FLOAT32_BYTES = 4
ITEMSIZE = {"float32": FLOAT32_BYTES, "bfloat16": 2}
EXPERT_OF_TILE = "experts of tiles"
Arrays = dict[str, int]  # name -> elements


@dataclass(frozen=True)
class LayerSizes:
    """Elements of the arrays of one layer and microbatch on one device.

    Attributes:
        stream: "batch local_seq hidden", split along the sequence.
        queries: "batch seq local_head head_dim", and the attended values.
        keys: elements of the local key-value heads; the same for the values.
        width: "batch seq local_width", between the matmuls of the feed forward; of experts, "tile row local_width".
        scores: "batch local_head seq seq".
        rows: "batch local_head seq", of queries.
    """

    stream: int
    queries: int
    keys: int
    width: int
    scores: int
    rows: int


def layer_sizes(setting: Setting) -> LayerSizes:
    """Sizes of the arrays of `setting`."""
    anatomy = setting.anatomy
    num_parts = setting.num_kernel_parts
    num_tokens = setting.microbatch_size * setting.seq_len
    # A device has whole heads, so that the number of heads is divided first.
    rows = num_tokens * (anatomy.num_heads // num_parts)
    return LayerSizes(
        stream=num_tokens * anatomy.hidden // setting.num_token_parts,
        queries=rows * anatomy.head_size,
        keys=num_tokens * (anatomy.num_kv_heads // num_parts) * anatomy.head_size,
        width=feed_forward_rows(setting) * anatomy.width // num_parts,
        scores=rows * setting.seq_len,
        rows=rows,
    )


def feed_forward_rows(setting: Setting) -> int:
    """Rows that a layer's feed forward computes for a microbatch: its tokens, or the rows of its experts' tiles."""
    anatomy = setting.anatomy
    num_tokens = setting.microbatch_size * setting.seq_len
    if anatomy.num_experts == 1:
        return num_tokens
    return math.prod(dispatch_of_setting(setting).shape(setting.microbatch_size, setting.seq_len))


def dispatch_of_setting(setting: Setting) -> Dispatch:
    """How tokens come to the experts of a layer that has several."""
    of = setting.anatomy
    over = Axis(" ".join(EXPERT_AXES), setting.num_expert_parts)  # of which the size alone is read
    return dispatch_of(of.num_experts, of.experts_per_token, of.capacity_factor, over)


@dataclass(frozen=True)
class LayerResiduals:
    """The arrays that one layer saves for one microbatch, in elements by name.

    Attributes:
        itemsize: bytes of an element, except in `float32` arrays.
        saved: arrays that forward saves for the backward.
        deferred: arrays that I saves for its W.
        shared_with_w: names of the saved arrays that W reads; only I needs the others.
        float32, int32: names of arrays that have this dtype whatever the model computes in.
    """

    itemsize: int
    saved: Arrays
    deferred: Arrays
    shared_with_w: tuple[str, ...]
    float32: tuple[str, ...]
    int32: tuple[str, ...] = ()

    @property
    def page_bytes(self) -> int:
        """Bytes of the saved arrays: one page."""
        return self._bytes(self.saved)

    @property
    def deferred_bytes(self) -> int:
        """Bytes that I saves for W."""
        return self._bytes(self.deferred)

    @property
    def apart_bytes(self) -> int:
        """Bytes that I saves for W beyond those that take the place of saved arrays that W does not read.

        Source: `jaxpipe.program.storage`: for each dtype, the arrays that fill the room best take the place.

        Example:
            >>> bf16 = LayerResiduals(2, saved={"x": 10, "y": 6}, deferred={"dx": 7, "dy": 4, "dz": 3},
            ...                       shared_with_w=("y",), float32=())
            >>> bf16.apart_bytes  # dx and dz take the ten elements of x; dy is left over
            8
        """
        kept = 0
        others = {*self.saved, *self.deferred}.difference(self.float32, self.int32)
        # Arrays share memory only with arrays of their dtype.
        for itemsize, names in ((self.itemsize, others), (FLOAT32_BYTES, self.float32), (FLOAT32_BYTES, self.int32)):
            free, wanted = (
                [size for name, size in arrays.items() if name in names]
                for arrays in (
                    {n: size for n, size in self.saved.items() if n not in self.shared_with_w},
                    self.deferred,
                )
            )
            # A subset sum decides which deferred arrays fill the room best; of a dozen arrays all sums can be tried.
            sums = {0}
            for size in wanted:
                sums |= {total + size for total in sums if total + size <= sum(free)}
            kept += itemsize * max(sums)
        return self.deferred_bytes - kept

    def _bytes(self, arrays: Arrays) -> int:
        wide = (*self.float32, *self.int32)
        return sum(size * (FLOAT32_BYTES if name in wide else self.itemsize) for name, size in arrays.items())


def layer_residuals(setting: Setting, *, recompute: str | None = None) -> LayerResiduals:
    """The arrays that a layer of `setting` saves.

    Args:
        setting: the setting of one step.
        recompute: recompute setting in place of the model's own.

    Values that are cheap to compute from these arrays (norms, activations, the gathered stream, dropout's masks) are
    recomputed. Between F and B, with stream x, queries q, keys and values k, width w, rows r:

        recompute full                x
        attention chunked, cudnn      2 x + 2 q + 2 k + w (2 w where gated), and the log-sum-exp of r rows, float32
        attention xla                 the same with scores in place of r; recompute attention: with neither

    A layer whose halves are parallel has no stream between them: x in place of 2 x. There W recomputes the outputs of
    both norms from x and one number per token of each norm, which takes less than two streams.

    Source: Korthikanti et al., MLSys 2023, section 4.2, for what stays; the arrays are those of `jaxpipe.models.block`.
    """
    recompute = recompute or setting.model.recompute
    of = layer_sizes(setting)
    full = recompute == "full"
    parallel = setting.anatomy.parallel
    routing = routing_residuals(setting) if setting.anatomy.num_experts > 1 else {}
    between = {} if parallel else {"stream between": of.stream}
    ups = {f"input {i} of the activation": of.width for i in range(setting.anatomy.num_up)}
    # A layer that is computed again keeps what its router chose, as the vjp and as the recomputation read it.
    saved = {"input": of.stream}
    if routing:
        saved |= {CHOSEN: routing[CHOSEN]} | ({f"{CHOSEN}, again": routing[CHOSEN]} if full else {})
    if not full:
        saved |= {
            "queries": of.queries,
            "keys": of.keys,
            "values": of.keys,
            "attended": of.queries,
            **between,
            **ups,
            **routing,
        }
        # Fused and chunked attention recompute probabilities from these; xla's saves them.
        if setting.model.attention != "xla":
            saved["log-sum-exp"] = of.rows
        elif recompute == "none":
            saved["probabilities"] = of.scores
    of_routing = _deferred_of_routing(setting) if routing else {}
    of_tiles = {name: size for name, size in routing.items() if name == EXPERT_OF_TILE}
    # A layer of parallel halves keeps a number a token of each norm and computes the outputs again in W.
    size_of_norm = of.stream // setting.anatomy.hidden if parallel else of.stream
    norms = {"norm of attention": size_of_norm, "norm of the feed forward": size_of_norm}
    deferred = {
        "gradient of the output": of.stream,
        "activated": of.width,
        **{f"gradient of {name}": size for name, size in (ups | between).items()},
        "gradient of queries, keys and values": of.queries + 2 * of.keys,
        **norms,
        **({"attended": of.queries} if full else {}),
        # Recomputed in I, so that W finds them only if I defers them; else they are saved from forward.
        **(of_tiles if full else {}),
        **of_routing,
    }
    fractions = ("weights of the chosen", "shares of experts", "gradient of the logits")
    return LayerResiduals(
        itemsize=ITEMSIZE[setting.dtype],
        saved=saved,
        deferred=deferred,
        shared_with_w=(*(["input"] if parallel else []), *([] if full else ["attended", *of_tiles])),
        float32=("log-sum-exp", *fractions, *(norms if parallel else ())),
        int32=tuple({*routing, f"{CHOSEN}, again", *of_routing}.difference(fractions)),
    )


def routing_residuals(setting: Setting) -> Arrays:
    """The arrays that experts save besides rows, four bytes each: see `jaxpipe.models.dispatch.Tiles` and `Routing`."""
    anatomy = setting.anatomy
    rows = feed_forward_rows(setting)
    dispatch = dispatch_of_setting(setting)
    choices = setting.microbatch_size * setting.seq_len * anatomy.experts_per_token
    of_all = choices * dispatch.num_sources
    num_tiles, _ = dispatch.shape(setting.microbatch_size, setting.seq_len)
    return {
        # The router sees a device's own tokens only; its choices are gathered for the rest.
        CHOSEN: choices // setting.num_token_parts,
        "weights of the chosen": of_all,
        "choice of a row": rows,
        "row of a choice": of_all,
        **({EXPERT_OF_TILE: num_tiles} if dispatch.names_experts else {}),
        "shares of experts": anatomy.num_experts,
    }


def _deferred_of_routing(setting: Setting) -> Arrays:
    """The arrays that I saves for W of experts besides rows, four bytes each."""
    return {
        "token of a row": feed_forward_rows(setting),
        "token of a row, for the gradient": feed_forward_rows(setting),
        "gradient of the logits": layer_sizes(setting).stream // setting.anatomy.hidden * setting.anatomy.num_experts,
    }

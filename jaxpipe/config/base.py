"""All fields of a config with their meanings and defaults; those of `model` are defined by its family."""

from __future__ import annotations

import re
from typing import Any

from ml_collections import ConfigDict

from jaxpipe.cluster.axes import ROWS
from jaxpipe.config.model import example_of, model_section
from jaxpipe.config.other_names import closest_field, elsewhere
from jaxpipe.errors import ConfigError
from jaxpipe.models import FAMILIES, family_named

AUTO = "auto"  # value of a field that is derived from others


def base_config(family: str = "gpt") -> ConfigDict:
    """A locked config with all fields at their defaults, which can be set but not added to.

    Args:
        family: name of the model family, as for `jaxpipe.models.family_named`; decides the fields of `model` and
            `data`. "given": model and batches are given to `jaxpipe.training.fit`.

    Raises:
        ConfigError: there is no such family.
    """
    config = _section()

    config.model = _section(model_section(family))

    config.data = _data_section(family)

    config.pipeline = _section()
    # A key of jaxpipe.schedules.REGISTRY; a .py file with a method of your own; or the path of a schedule's .csv or
    # .json, as jaxpipe.optimize writes it.
    config.pipeline.schedule = "1f1b"
    config.pipeline.options = ""  # of the schedule, as "num_chunks=3,eager_sync=false" of bitpipe
    # Expected times of a stage's actions, for orders, rounds and predictions: "forward=1.0,backward=1.8", only ratios
    # matter, keys are fields of jaxpipe.schedules.Costs; or a file of jaxpipe.measure. "auto": those of a known GPU,
    # else by model.recompute, except for times in options.
    config.pipeline.costs = "auto"
    # Of one step; times the devices of mesh that split microbatches it divides data.batch_size.
    config.pipeline.num_microbatches = 16
    config.pipeline.layers_per_stage = "auto"  # one count a stage, as "4,4,3,5"; "auto": as balanced as possible
    config.pipeline.embedding_layers = 0.0  # cost of the embedding in the first stage, in layers, for "auto"
    config.pipeline.head_layers = 0.0  # cost of head and loss in the last stage, in layers, for "auto"

    # Embedding and head: "true" splits them by rows of the vocabulary over mesh.pipe too, and gives every
    # device its part of each microbatch's head; "false" has them in the first and the last stage; "auto": "true" where
    # a step is estimated to be shorter, on GPUs that are known.
    config.pipeline.vocab_over_pipe = "false"

    # Devices along each axis, as `jaxpipe/cluster/axes.py` describes it: mesh.data = 1, mesh.pipe = 8, ...
    config.mesh = _section({row.name: row.default for row in ROWS})
    config.mesh.platform = "auto"  # "gpu", "cpu" (virtual devices); "auto": GPUs where the mesh fits, else cpu
    # Which device holds which stage: "contiguous", in the order of the devices; "pair_adjacent", both devices of a pair
    # (d, D-1-d) in one node; "replicas_together", all devices that hold a stage in one node, in both directions and in
    # all copies. "auto": pair_adjacent if the schedule moves activations within pairs; with two replicas, the first of
    # replicas_together, pair_adjacent and contiguous in which the mesh can be laid out.
    config.mesh.order = "auto"
    config.mesh.deterministic = False  # True: sums over devices are added in mesh order, with equal digits in every run

    config.optimizer = _section()
    # "adamw"; "muon": the kernels of layers by Muon, the rest by AdamW; "lion"; "sgd".
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 1e-3  # the peak, after warm-up
    config.optimizer.warmup_fraction = 0.05  # of the steps: linear to the peak
    config.optimizer.warmup_steps = 0  # the same in steps; above 0 it replaces the fraction
    # Then "cosine" to the last step; "wsd": the peak, and a line down in the last steps; "constant".
    config.optimizer.schedule = "cosine"
    config.optimizer.decay_fraction = 0.2  # of the steps, for wsd's line down
    config.optimizer.final_learning_rate_fraction = 0.1  # of the peak, at the end of cosine or line
    config.optimizer.weight_decay = 0.1  # on kernels only
    config.optimizer.beta1 = 0.9  # of AdamW and Lion; momentum of SGD
    config.optimizer.beta2 = 0.95  # of AdamW and Lion
    config.optimizer.epsilon = 1e-8  # of AdamW
    config.optimizer.muon_beta = 0.95  # momentum of Muon
    config.optimizer.max_grad_norm = 1.0  # gradients with a larger global norm are scaled to this
    # For schedules without flush: to each gradient, which is of older weights, is added what the one before it lacked.
    config.optimizer.error_feedback = False
    # Parameters and optimizer state: True shards them over the devices that compute with equal copies, those of
    # embedding and head over mesh.pipe too; False keeps them whole on each device.
    config.optimizer.zero1 = True

    config.train = _section()
    config.train.steps = 300
    config.train.seed = 0  # of the initial parameters and of dropout
    config.train.eval_every = 100  # steps between held-out losses; there is always one at the end
    # Steps between rows of metrics; a step with a held-out loss, or whose numbers are not finite, always has one.
    config.train.log_every = 1
    config.train.eval_batches = 8  # held-out batches of one evaluation, at most
    # Consecutive skipped steps (loss or gradients not finite) before the run ends with an error.
    config.train.max_skipped_in_row = 5
    config.train.lost_after_s = 120.0  # a process that is lost or stuck in a step for so long ends the run

    config.checkpoint = _section()
    config.checkpoint.init_from = ""  # folder of a run whose parameters the run starts from; "": initial ones
    config.checkpoint.save_every = 100  # steps between checkpoints of the train state; 0: none before the end
    config.checkpoint.save_at_end = True  # whether there is one after the last step, whatever save_every says
    config.checkpoint.keep_last = 3  # number of newest checkpoints that are kept
    config.checkpoint.keep_every = 0  # steps between checkpoints that are kept forever; 0: none
    config.checkpoint.keep_best = 0  # number of checkpoints with the least held-out loss that are kept
    return config.lock()


def _data_section(family: str) -> ConfigDict:
    """The section `data`, which depends on what the family reads."""
    data = _section()
    if family_named(family).is_given:
        data.batch_size = 0  # sequences of one step, over all devices; 0: as many as the batches have
        return data
    # A glob of text files, ** descends; "auto": Python's standard library; "indexed:PREFIX": what jaxpipe.prepare
    # wrote, or Megatron-LM, as PREFIX.bin and PREFIX.idx; "indexed:0.7 PREFIX 0.3 PREFIX": a blend, by weight.
    data.files = "auto"
    data.tokenizer = "byte"  # a token is a byte; or the path of a tokenizer.json, or of a folder that has one
    data.batch_size = 32  # sequences of one step, over all devices
    data.seq_len = 128  # tokens of one sequence
    data.heldout_fraction = 0.05  # fraction of the text that is held out, about; in (0, 0.5]
    data.seed = 0  # of the order of the sequences, and of masks
    if not family_named(family).masked:
        # The contents of a row: "windows" of the running text, in which attention crosses the ends of documents;
        # whole "documents" back to back, each of which sees itself alone; "none", one document, padded.
        data.packing = "windows"
    if family_named(family).masked:
        data.mask_fraction = 0.15  # fraction of the tokens of a sequence to predict; in (0, 1]
        data.short_fraction = 0.1  # fraction of sequences shorter than seq_len, about
    return data


def unknown_field(error: BaseException, *, where: str, repair: str) -> ConfigError:
    """The error for a field that is unknown, of another model family or of the wrong type.

    Args:
        error: an AttributeError, KeyError or TypeError of ml_collections.
        where: the source that was being read.
        repair: advice for the user if the field belongs to no family.
    """
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = str(error.args[0] if error.args else error)
    other = None if isinstance(error, TypeError) else _other_families(text)
    if other:
        field, families = other
        return ConfigError(
            f"model.{field} is no field of this model's family, in {where}",
            rule=(
                f"model-family: a model has the fields of its family, and {field} is one of"
                f" model.family={' or '.join(map(repr, families))} alone"
            ),
            repair=f"leave it out, or take a config of base_config(family={families[0]!r})"
            + example_of(FAMILIES[families[0]]),
        )
    return ConfigError(
        f"a field is unknown or of the wrong type, in {where}\n" + _with_names_of_others(text.strip("\"'")),
        rule="config-fields: the fields and their types are those of jaxpipe.config.base_config()",
        repair=repair,
    )


def _with_names_of_others(text: str) -> str:
    """`text` of ml_collections with what other trainers' name in it is here, and its guess only if that is close."""
    named = re.search(r'^Key "(\w+)" does not exist', text)
    guess = re.search(r'\s*Did you mean "(\w+)"[^\n?]*\?', text)
    if not named:
        return text
    if other := elsewhere(named[1]):
        return f"{named[1]}: {other}\n{text[: guess.start()] if guess else text}"
    return text[: guess.start()] if guess and not closest_field(named[1], [guess[1]]) else text


def _other_families(text: str) -> tuple[str, list[str]] | None:
    """The field that `text` names first, and the families that have it; None if all or none have it."""
    quoted = re.search(r"""["'](\w+)["']""", text)
    families = [name for name in FAMILIES if quoted and quoted[1] in model_section(name)]
    return (quoted[1], families) if quoted and 0 < len(families) < len(FAMILIES) else None


def _section(fields: dict[str, Any] | None = None) -> ConfigDict:
    return ConfigDict(fields, sort_keys=False)  # pyright: ignore[reportCallIssue]  # its stub is behind

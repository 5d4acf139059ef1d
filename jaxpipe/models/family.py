"""One table of model families, the config of one model of a family, and the way to add a family from an own file.

A family has the config fields of its models and builds a `ModelConfig` from them, which builds the modules. All that
other code needs to know about one of its models is that model's `Anatomy`: nothing outside a family's own file asks for
its name or its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Protocol

from flax import nnx

from jaxpipe.errors import ConfigError, closest
from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.python_file import is_python_file, value_in_file

Fields = dict[str, Any]


class ModelConfig(Protocol):
    """Config of one model of a family, a frozen dataclass: its anatomy, its choices, and the modules that it builds."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    # With layers of several kinds, which have parameters of the same shapes, it has `kinds`, a config of each that
    # builds its block, and `pattern`, a `jaxpipe.layer_kinds.Pattern`; its own `new_block` is that of kind 0.
    # With a head that has a layer of its own, as for a further token, it has `layer_of_head`, a config of a model of
    # such layers, and `further_losses`, the names of losses that count in training alone.
    # A ClassVar `splits_sequences = True` says that its modules know `TensorAxis.context`: the embedding cuts out its
    # tokens, blocks attend over it as `SelfAttention`, and the head, as `Head`, says which targets it predicts.

    @property
    def num_layers(self) -> int:
        """Transformer layers."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the logits use the token table."""
        ...

    @property
    def attention(self) -> str:
        """Form of attention, a key of `jaxpipe.models.attention.ATTENTION`."""
        ...

    @property
    def recompute(self) -> str:
        """The recomputation in backward, one of `jaxpipe.models.choices.RECOMPUTE`."""
        ...

    @property
    def anatomy(self) -> Anatomy:
        """Anatomy of the model."""
        ...

    def num_losses(self, batch: dict[str, Any]) -> Any:
        """Number of terms in each sum of the head, for a batch."""
        ...

    def new_embedding(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Embedding: a module from (microbatch, random) to the stream, an `Embedding` or one with the same methods."""
        ...

    def new_block(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """One layer: a module from (stream, token_arrays, random) to the stream.

        `token_arrays` are the arrays of the microbatch named in TOKEN_ARRAYS, as far as it has them. With a method
        `following`, as that of `jaxpipe.models.block.Block`, sampling keeps keys and values; without one it computes
        all tokens again.
        """
        ...

    def new_head(self, tensor: TensorAxis, rngs: nnx.Rngs) -> nnx.Module:
        """Head: a module that ends before the logits' matmul, as `jaxpipe.models.embedding_and_head.Head`.

        `features(stream, microbatch)` returns what is multiplied with the parameter `kernel`, or with the token table
        if embeddings are tied, and a dict of further losses; a parameter `bias`, if any, is added to the products.
        `losses(words, others)`, linear, is the head's result, `logits(stream, token table or None)` that of one device.
        """
        ...


@dataclass(frozen=True, eq=False)
class Family:
    """A kind of model, as GPT.

    Attributes:
        name: value of `model.family` in a config.
        fields: fields of the section `model` of a config, with their defaults; a value has the type of its default.
            Every family has num_layers, vocab_size, attention, recompute and dtype.
        build: (fields, data.seq_len) -> the config of a model. `fields` are all but dtype, with None for a field
            of `words` that holds its word; it raises ConfigError if they do not fit together. The config may have a
            method `layer_sizes`, (TensorAxis, microbatch size, data.seq_len) -> numbers: every size of an array or
            matmul of a layer that grows with the microbatch is a multiple of one of them, the first that divides it.
            Estimates then trace a layer once for all microbatch sizes, else once for each.
        words: the word that a text field takes in place of a number, by field: {"window": "none"}.
        choices: the legal words of fields that `build` does not check, by field.
        check: (fields, data.seq_len) -> raises ConfigError for fields that `build` accepts but that must be a mistake.
        masked: whether a model predicts masked tokens; False: each next token.
        is_given: whether a run's model is given in Python, and its batches too: nothing else knows them.
        example: path of a config of the family, which errors name.

    Example:
        >>> FAMILIES["gpt"].fields["hidden"]
        128
    """

    name: str
    fields: Mapping[str, Any]
    build: Callable[[Fields, int], ModelConfig]
    words: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Fields, int], None] = lambda fields, seq_len: None
    masked: bool = False
    is_given: bool = False
    example: str = ""


FAMILIES: dict[str, Family] = {}


def _is_given(fields: Fields, seq_len: int) -> NoReturn:
    raise ConfigError(
        f"model.family={GIVEN!r}: the model was given in Python",
        rule="given-model: only jaxpipe.training.fit, with model=..., knows such a model and its batches",
        repair="call fit from Python; for a command take a config of another family",
    )


# Not among FAMILIES, which a command's config can name.
GIVEN = "given"
_GIVEN = Family(
    name=GIVEN,
    fields={
        "num_layers": 0,  # 0: as many as the parameters have
        "dtype": "float32",  # in which layers compute; parameters and optimizer are float32
        "recompute": "none",  # "full": a layer is computed again in backward; or counts by stage, as "full:4,3,2,0"
    },
    build=_is_given,
    choices={"recompute": ("none", "full")},
    is_given=True,
)


def register_family(family: Family) -> Family:
    """Adds `family` to FAMILIES, so that `model.family` may be its name; returns it.

    Raises:
        ConfigError: another family has this name.
    """
    # The same object twice is no error: a module that registers its family may be imported again.
    if FAMILIES.setdefault(family.name, family) is not family:
        raise ConfigError(
            f"a family {family.name!r} exists already",
            rule="family-name: every family has its own name",
            repair="give the new one another name",
        )
    return family


def family_named(name: str) -> Family:
    """The family that `model.family` names.

    Args:
        name: a key of FAMILIES; or "FILE.py" for the Family in a Python file, "FILE.py:NAME" for one of several.

    Raises:
        ConfigError: the family is unknown, or the file cannot be run.

    Example:
        >>> family_named("bert").masked
        True
    """
    # Before the table: the word is no family's name, and no command may name it.
    if name == GIVEN:
        return _GIVEN
    if name in FAMILIES:
        return FAMILIES[name]
    if is_python_file(name):
        return value_in_file(name, Family, built_in=FAMILIES.values(), error=ConfigError)
    raise ConfigError(
        f"model.family={name!r} is not known.{closest(name, list(FAMILIES))}",
        rule=f"field-choice: model.family is one of {', '.join(sorted(FAMILIES))}, or a Python file",
        repair="set model.family to one of these",
    )

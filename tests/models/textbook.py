"""GPT, BERT and LLaMA as their papers write them, in plain jnp, for plain autodiff.

Shares no code with `jaxpipe.models`, only names and layout of the parameters. What is dropped is asked of
`drop(name, array)`, which gives the array back where nothing is.
"""

import jax
import jax.numpy as jnp


def nothing_dropped(name, x):
    return x


def layer_norm(x, params, epsilon=1e-5):
    """Ba et al. 2016, equation 4."""
    mean = x.mean(axis=-1, keepdims=True)
    deviation = jnp.sqrt(x.var(axis=-1, keepdims=True) + epsilon)
    return (x - mean) / deviation * params["scale"] + params["bias"]


def rms_norm(x, params, epsilon=1e-5):
    """Zhang and Sennrich 2019, equation 4."""
    return x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + epsilon) * params["scale"]


ACTIVATIONS = {
    # Hendrycks and Gimpel 2016, section 2: the form with tanh, and x times the normal distribution.
    "gelu_tanh": lambda x: 0.5 * x * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "gelu": lambda x: x * (1 + jax.lax.erf(x / 2**0.5)) / 2,
    "relu": lambda x: jnp.where(x > 0, x, 0.0),
}


def linear(params, x):
    return x @ params["kernel"] + params.get("bias", 0.0)


def feed_forward(params, x, activation="gelu_tanh"):
    """Vaswani et al. 2017, equation 2, with another activation."""
    return linear(params["down"], ACTIVATIONS[activation](linear(params["up"], x)))


def swiglu_feed_forward(params, x):
    """Shazeer 2020, equation 6."""
    gate, up = linear(params["gate"], x), linear(params["up"], x)
    return linear(params["down"], gate / (1 + jnp.exp(-gate)) * up)


def rotary(x, theta, stretch=1.0):
    """Su et al. 2021, equation 34, with planes (i, i + size / 2); `x` "batch head seq size".

    Positions are divided by `stretch`: Chen et al. 2023, equation 4.
    """
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[-2])[:, None] / stretch * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.tile(jnp.cos(angle), 2), jnp.tile(jnp.sin(angle), 2)
    return x * cos + jnp.concatenate([-x[..., half:], x[..., :half]], axis=-1) * sin


def seen_keys(seq, *, causal=True, window=None, padding_mask=None, document=None):
    """Whether each query sees each key, "batch or 1, head 1, query, key", a pair at a time as it were.

    `document` "batch seq": a number for the document of each token.
    """
    query, key = jnp.meshgrid(jnp.arange(seq), jnp.arange(seq), indexing="ij")
    seen = (key <= query) if causal else jnp.ones((seq, seq), bool)
    seen = seen if window is None else seen & (key > query - min(window, seq))
    seen = seen[None, None]
    if document is not None:
        seen = seen & (document[:, :, None] == document[:, None, :])[:, None]
    return seen if padding_mask is None else seen & (padding_mask == 1)[:, None, None]


def attention(params, x, *, num_heads, num_kv_heads, seen, theta=None, stretch=1.0, drop=nothing_dropped):
    """Vaswani et al. 2017, equation 1, with heads in groups (Ainslie et al. 2023), before the residual."""
    columns = linear(params["query_key_value"], x)
    group, size = num_heads // num_kv_heads, params["output"]["kernel"].shape[0] // num_heads
    queries, keys, values = [], [], []
    for of_group in jnp.split(columns, num_kv_heads, axis=-1):
        *in_group, key, value = jnp.split(of_group, group + 2, axis=-1)
        queries, keys, values = queries + in_group, keys + group * [key], values + group * [value]
    query, key, value = (jnp.stack(heads, axis=1) for heads in (queries, keys, values))  # "batch head seq size"
    if theta is not None:
        query, key = rotary(query, theta, stretch), rotary(key, theta, stretch)
    scores = jnp.where(seen, query @ jnp.swapaxes(key, 2, 3) / size**0.5, -jnp.inf)
    attended = drop("probabilities", jax.nn.softmax(scores)) @ value
    side_by_side = jnp.concatenate(list(jnp.moveaxis(attended, 1, 0)), axis=-1)
    return linear(params["output"], side_by_side)


def gpt_layer(config, params, x, drop=nothing_dropped, seen=None):
    """Radford et al. 2019, section 2.3: a norm before each half, a residual around it."""
    normed = layer_norm(x, params["attention"]["norm"], config.norm_epsilon)
    seen = seen_keys(x.shape[1]) if seen is None else seen
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_heads}
    x = x + drop("attention", attention(params["attention"], normed, **heads, seen=seen, drop=drop))
    normed = layer_norm(x, params["feed_forward"]["norm"], config.norm_epsilon)
    return x + drop("feed_forward", feed_forward(params["feed_forward"], normed, config.activation))


def bert_layer(config, params, x, drop=nothing_dropped, padding_mask=None):
    """Shoeybi et al. 2019, figure 7 (b): GPT's, with every token in sight but padding."""
    seen = seen_keys(x.shape[1], causal=False, padding_mask=padding_mask)
    return gpt_layer(config, params, x, drop, seen)


def llama_layer(config, params, x, drop=nothing_dropped):
    """Touvron et al. 2023, section 2.2; Jiang et al. 2023, section 2, for the window."""
    normed = rms_norm(x, params["attention"]["norm"], config.norm_epsilon)
    heads = {"num_heads": config.num_heads, "num_kv_heads": config.num_kv_heads, "theta": config.rope_theta}
    stretch = 1.0 if config.rope_scaling is None else config.rope_scaling.factor
    seen = seen_keys(x.shape[1], window=config.sliding_window)
    x = x + attention(params["attention"], normed, **heads, seen=seen, stretch=stretch)
    normed = rms_norm(x, params["feed_forward"]["norm"], config.norm_epsilon)
    return x + swiglu_feed_forward(params["feed_forward"], normed)


def cross_entropy_sum(x, kernel, targets):
    """The sum of -log softmax(x @ kernel.T)[target] over the targets that are not below 0."""
    return loss_of_logits(x @ kernel.T, targets)


def loss_of_logits(logits, targets):
    """The sum of -log softmax(logits)[target] over the targets that are not below 0."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(targets, 0)[..., None], axis=-1)[..., 0]
    return -jnp.where(targets >= 0, chosen, 0.0).sum()


def stream(family, config, params, batch, drops=None):
    """The residual stream after the final norm; arguments as of `loss_sum`."""
    drops = drops or [nothing_dropped] * (1 + config.num_layers)
    embedding, norm = params["shared"]["embedding"], params["shared"]["head"]["norm"]
    x = embedding["token"][batch["tokens"]]
    if family != "llama":
        x = x + embedding["position"][: x.shape[1]]
    if family == "bert":
        x = x + embedding["token_type"][batch["token_types"]]
    x = drops[0]("embedding", x)
    of_layer = {"gpt": gpt_layer, "bert": bert_layer, "llama": llama_layer}[family]
    padding = {"padding_mask": batch["padding_mask"]} if family == "bert" else {}
    for i in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x = of_layer(config, layer, x, drops[i + 1], **padding)
    return (rms_norm if family == "llama" else layer_norm)(x, norm, config.norm_epsilon)


def logits(family, config, params, batch, drops=None):
    """Those of every position; of BERT a dict of them and of the order's. Arguments as of `loss_sum`."""
    x, head = stream(family, config, params, batch, drops), params["shared"]["head"]
    kernel = (params["shared"]["embedding"]["token"] if config.tie_embeddings else head["kernel"])[: config.vocab_size]
    if family != "bert":
        return x @ kernel.T
    # Devlin et al. 2019, section 3.1: the first token stands for the sequence; its code: the transform of the words.
    transformed = layer_norm(
        ACTIVATIONS[config.activation](linear(head["transform"], x)), head["transform_norm"], config.norm_epsilon
    )
    words = {"masked_lm": transformed @ kernel.T + head["bias"][: config.vocab_size]}
    if not config.sentence_order:
        return words
    return words | {"sentence_order": linear(head["sentence_order"], jnp.tanh(linear(head["pooler"], x[:, 0])))}


def loss_sum(family, config, params, batch, drops=None):
    """The loss of a whole model, of BERT a dict of losses.

    Args:
        family: "gpt", "bert" or "llama".
        drops: the `drop` of the embedding and then of every layer; None drops nothing.
    """
    found = logits(family, config, params, batch, drops)
    if family != "bert":
        return loss_of_logits(found, batch["targets"])
    of_predicted = jnp.stack([of_one[at] for of_one, at in zip(found["masked_lm"], batch["predicted"], strict=True)])
    losses = {"masked_lm": loss_of_logits(of_predicted, batch["targets"])}
    if config.sentence_order:
        losses["sentence_order"] = loss_of_logits(found["sentence_order"], batch["sentence_order"])
    return losses

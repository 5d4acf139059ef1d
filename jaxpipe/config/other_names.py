"""Names that other trainers give to a field, and its name here.

The names are those of Megatron-LM, MaxText, torchtitan, Hugging Face's Trainer and DeepSpeed. Goes in: a name that is
no field of a config. Comes out: a sentence for the error, or nothing. The tables are data: a field that is added here
takes its other names out of NOT_HERE.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from jaxpipe.cluster.axes import BATCH_AXES, ROWS

CLOSE = 0.7  # of difflib: "hiden" is close to "hidden", "slice" is not to "tensor"

# Ours, or how ours make it -> others' names, without their sections.
HERE: dict[str, str] = {
    "model.num_layers": "n_layers num_hidden_layers base_num_decoder_layers n_layer depth",
    "model.hidden": "hidden_size d_model emb_dim base_emb_dim n_embd dim model_dim",
    "model.num_heads": "num_attention_heads n_heads n_head base_num_query_heads",
    "model.num_kv_heads": "num_query_groups num_key_value_heads n_kv_heads base_num_kv_heads",
    "model.feed_forward": "ffn_hidden_size intermediate_size base_mlp_dim mlp_dim d_ff",
    "model.vocab_size": "padded_vocab_size n_vocab",
    "model.vocab_multiple": "make_vocab_size_divisible_by",
    "model.num_positions": "max_position_embeddings n_positions",
    "model.rope_theta": "rotary_base rope_max_timescale rope_base",
    "model.sliding_window": "window_size sliding_window_size",
    "model.norm_epsilon": "norm_eps layernorm_epsilon rms_norm_eps normalization_layer_epsilon",
    "model.num_experts": "n_routed_experts num_local_experts moe_num_experts",
    "model.experts_per_token": "moe_router_topk num_experts_per_tok top_k_experts moe_top_k",
    "model.balance_loss": "moe_aux_loss_coeff router_aux_loss_coef load_balance_loss_weight",
    "model.z_loss": "moe_z_loss_coeff",
    "model.mtp_factor": "mtp_loss_scaling_factor mtp_loss_weight",
    "model.hidden_dropout, model.embedding_dropout and model.attention_dropout": "dropout dropout_rate",
    "model.recompute, 'full', 'attention' or 'none'": (
        "recompute_granularity recompute_activations recompute_method remat_policy remat gradient_checkpointing"
        " activation_checkpoint activation_checkpointing"
    ),
    "model.lora_rank": "lora lora_r lora_dim peft",
    "model.lora_targets": "target_modules lora_target_modules lora_attn_modules",
    "model.dtype='bfloat16', with float32 masters": "bf16 mixed_precision mixed_precision_param param_dtype precision",
    "model.attention, 'cudnn' or 'chunked'": "use_flash_attn flash_attention attn_implementation attention_backend",
    "data.batch_size": "global_batch_size train_batch_size global_batch batch",
    "data.batch_size / (" + " x ".join(f"mesh.{axis}" for axis in BATCH_AXES) + " x pipeline.num_microbatches)": (
        "micro_batch_size local_batch_size per_device_batch_size per_device_train_batch_size microbatch_size"
        " train_micro_batch_size_per_gpu device_batch_size"
    ),
    "pipeline.num_microbatches": (
        "gradient_accumulation_steps gradient_accumulation grad_accum_steps accumulate_steps num_micro_batches"
        " num_pipeline_microbatches pipeline_parallel_microbatch_size accumulation_steps grad_accum"
    ),
    "data.seq_len": "seq_length max_seq_length max_target_length max_seq_len sequence_length context_length block_size",
    "data.files": "data_path dataset_path dataset train_data_path train_file grain_train_files dataset_name",
    "data.tokenizer": "tokenizer_path tokenizer_model tokenizer_type tokenizer_name hf_assets_path",
    "data.heldout_fraction": "split validation_split eval_split",
    "data.packing": "reset_attention_mask pack_sequences packing_strategy",
    **{f"mesh.{row.name}": row.elsewhere for row in ROWS},
    "pipeline.schedule, with pipeline.options as num_chunks=2": (
        "pipeline_parallel_schedule virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage"
        " num_pipeline_repeats virtual_stages"
    ),
    "pipeline.layers_per_stage": (
        "pipeline_model_parallel_layout module_fqns_per_model_part decoder_first_pipeline_num_layers"
        " num_layers_per_pipeline_stage pipeline_parallel_layers_per_stage"
    ),
    "mesh.shard, 'none', 'optimizer', 'gradients' or 'weights'": (
        "use_distributed_optimizer zero_stage zero_optimization zero distributed_optimizer zero2 zero3 fsdp"
        " ici_fsdp_parallelism data_parallel_shard_degree dp_shard use_torch_fsdp2 dcn_fsdp_parallelism fsdp_config"
        " fully_shard hsdp"
    ),
    "mesh.keep_gathered, bytes as '12GiB', or 'none'": "reshard_after_forward fsdp_reshard_after_forward",
    "mesh.keep_sums, bytes as '12GiB', or 'none'": "no_sync set_requires_gradient_sync",
    "optimizer.learning_rate": "lr max_lr peak_lr base_lr",
    "optimizer.final_learning_rate_fraction, of the peak": "min_lr min_lr_factor cosine_learning_rate_final_fraction",
    "optimizer.warmup_fraction, of the steps": "warmup warmup_ratio warmup_steps_fraction lr_warmup_fraction",
    "optimizer.warmup_steps": "lr_warmup_iters lr_warmup_steps num_warmup_steps warmup_iters",
    "optimizer.schedule": "lr_decay_style lr_scheduler_type decay_type lr_schedule learning_rate_schedule lr_scheduler",
    "optimizer.decay_fraction": "decay_ratio lr_wsd_decay_iters lr_decay_iters",
    "optimizer.beta1": "adam_beta1 adam_b1 b1 momentum",
    "optimizer.beta2": "adam_beta2 adam_b2 b2",
    "optimizer.epsilon": "adam_epsilon adam_eps eps",
    "optimizer.weight_decay": "adam_weight_decay wd",
    "optimizer.max_grad_norm": (
        "clip_grad max_norm gradient_clipping gradient_clipping_threshold grad_clip grad_clip_norm"
    ),
    "optimizer.average_decay, as 0.999": "ema ema_decay use_ema exponential_moving_average",
    "optimizer.name": "optimizer opt_type optim optimizer_type",
    "train.steps": "train_iters max_steps num_train_steps training_steps total_steps num_steps iterations max_iters",
    "train.eval_every": "eval_interval eval_steps eval_freq eval_frequency val_interval",
    "train.eval_batches": "eval_iters max_eval_steps num_eval_batches",
    "train.log_every": "log_interval logging_steps log_freq log_period log_every_n_steps print_every",
    "train.seed": "init_weights_seed random_seed",
    "checkpoint.save_every": "save_interval save_steps checkpoint_period checkpoint_interval save_freq interval",
    "checkpoint.keep_last": "save_total_limit keep_latest_k max_num_checkpoints_to_keep",
    "checkpoint.init_from": (
        "load pretrained_checkpoint load_parameters_path initial_load_path load_checkpoint finetune"
        " resume_from_checkpoint"
    ),
    "--workdir of jaxpipe.train; the same command resumes": "save output_dir dump_folder base_output_directory resume",
    "--profile_steps of jaxpipe.train": "profile profiler enable_profiling profile_freq profile_step_start",
    "model.family='bert' or its config": "masked_lm mlm",
}

# Why it is not here, and what is instead -> others' names.
NOT_HERE: dict[str, str] = {
    "attention over mesh.context gathers keys and values, and passes nothing on in a ring": (
        "ring_attention ulysses ici_context_autoregressive_parallelism"
    ),
    "mesh.tensor always splits the sequence outside attention and feed forward": (
        "sequence sequence_parallel sp ici_sequence_parallelism"
    ),
    "products are in float32 or bfloat16; there is no loss scale, which bfloat16 does not need": (
        "fp8 fp8_format quantization float8 fp16 loss_scale initial_loss_scale"
    ),
    "a run counts steps: train.steps = epochs x tokens / (data.batch_size x data.seq_len)": (
        "epochs num_train_epochs num_epochs max_epochs"
    ),
    "XLA compiles every step; nothing is to be switched on": "compile use_jit jit torch_compile compile_model",
    "files are written in the background always": "async async_save async_checkpointing async_mode async_checkpoint",
    "metrics are in metrics.jsonl and tensorboard/ of --workdir": (
        "wandb wandb_project report_to tensorboard tensorboard_dir enable_tensorboard enable_wandb"
    ),
    "the frozen kernels beside adapters are not quantized; model.dtype='bfloat16' keeps them in 16 bits": "qlora",
}

_ADVICE = {
    theirs: advice
    for table, form in ((HERE, "here it is {}"), (NOT_HERE, "it is not here: {}"))
    for ours, names in table.items()
    for theirs, advice in ((name, form.format(ours)) for name in names.split())
}


def elsewhere(field: str) -> str:
    """The field, in words, that other trainers call so; empty for a name that none of them has.

    Args:
        field: a name, with or without a section: "mesh.fsdp", "lr", "micro-batch-size".

    Example:
        >>> elsewhere("optimizer.lr"), elsewhere("optimizer.learning_rat")
        ('here it is optimizer.learning_rate', '')
    """
    return _ADVICE.get(field.rpartition(".")[2].lower().replace("-", "_"), "")


def closest_field(field: str, known: Iterable[str]) -> str:
    """A hint at the known field whose own name, without its section, is like that of `field`; empty if none is.

    A section in common makes no two names alike.

    Example:
        >>> closest_field("model.hiden", ["model.hidden"]), closest_field("mesh.slice", ["mesh.tensor"])
        (" Did you mean 'model.hidden'?", '')
    """
    section, _, name = field.rpartition(".")

    def likeness(other: str) -> tuple[float, bool]:
        own_section, _, own = other.rpartition(".")
        return difflib.SequenceMatcher(None, name, own).ratio(), own_section == section

    best = max(known, key=likeness, default="")
    return f" Did you mean {best!r}?" if best and likeness(best)[0] >= CLOSE else ""

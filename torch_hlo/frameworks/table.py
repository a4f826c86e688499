"""Every change of a framework, in rows: its module, the function, and what is done to it. The page
docs/guide/frameworks.md says what follows for users."""

from collections.abc import Iterator

from torch_hlo.pytorch.registration import NAME

from .hook import Row, exchange, given_to, install, listed, marked, replaced, wrapped

_HUGGINGFACE = "torch_hlo.frameworks.huggingface:"
_LIGHTNING = "torch_hlo.frameworks.lightning:"
_LAST = exchange("cpu", NAME)  # the last device to choose is ours, not the CPU
_LISTED = listed("cuda", NAME)
_SAVE, _LOAD = (wrapped(f"{_HUGGINGFACE}{verb}_random") for verb in ("save", "load"))
_TRAINING = "transformers.training_args"

_HUGGINGFACE_ROWS = (
    Row("accelerate.state", "PartialState.default_device", _LAST),
    Row("accelerate.state", "PartialState._prepare_backend", wrapped(_HUGGINGFACE + "processes")),
    Row("accelerate.accelerator", "Accelerator.__init__", _LISTED),
    Row("accelerate.accelerator", "save_accelerator_state", _SAVE),
    Row("accelerate.accelerator", "load_accelerator_state", _LOAD),
    Row("accelerate.utils.dataclasses", "DynamoBackend", given_to(_HUGGINGFACE + "name_backend")),
    Row("accelerate.utils.modeling", "get_max_memory", wrapped(_HUGGINGFACE + "memory")),
    Row("accelerate.optimizer", "AcceleratedOptimizer.step", marked),
    Row("accelerate.utils", "get_max_memory", wrapped(_HUGGINGFACE + "memory")),
    Row("transformers.utils.import_utils", "is_torch_bf16_gpu_available", exchange(False, True)),
    Row(_TRAINING, "TrainingArguments._setup_devices", wrapped(_HUGGINGFACE + "setup_devices")),
    Row("transformers.pipelines.base", "Pipeline.__init__", wrapped(_HUGGINGFACE + "pipeline")),
    Row("transformers.trainer", "Trainer._save_rng_state", _SAVE),
    Row("transformers.trainer", "Trainer._load_rng_state", _LOAD),
    Row("transformers.trainer", "Trainer.prediction_step", marked),
)


def _lightning(fabric: str, pytorch: str) -> Iterator[Row]:
    """For packages of these names: there are two distributions."""
    register = given_to(_LIGHTNING + "register")
    yield Row(f"{fabric}.accelerators", "ACCELERATOR_REGISTRY", register)
    yield Row(f"{pytorch}.accelerators", "AcceleratorRegistry", register)
    yield Row(f"{fabric}.utilities.device_parser", "_select_auto_accelerator", _LAST)
    yield Row(f"{fabric}.connector", "_Connector._choose_auto_accelerator", _LAST)
    connectors = (
        (f"{fabric}.connector", "_Connector"),
        (f"{pytorch}.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    )
    for module, name in connectors:
        yield Row(module, f"{name}._choose_strategy", _LISTED)
        yield Row(module, f"{name}._check_strategy_and_fallback", _LISTED)
        yield Row(module, f"{name}._check_and_init_precision", listed("mps", NAME))
    ids = wrapped(_LIGHTNING + "device_ids")
    yield Row(f"{fabric}.strategies.ddp", "DDPStrategy._determine_ddp_device_ids", ids)
    yield Row(f"{pytorch}.strategies.ddp", "DDPStrategy.determine_ddp_device_ids", ids)
    yield Row(f"{fabric}.wrappers", "_FabricOptimizer.step", marked)
    steps = ("optimizer", "validation", "test", "predict")
    for step in steps:
        yield Row(f"{pytorch}.strategies.strategy", f"Strategy.{step}_step", marked)


_HERE = "torch_hlo.frameworks.without_cuda:"
_MIXED = wrapped(_HERE + "mixed")
_CLIP = wrapped(_HERE + "clip")
_FLEX = "torch.nn.attention.flex_attention"
_IGNITE = "ignite.distributed.comp_models."
_OTHER_ROWS = (
    Row("torch.amp.grad_scaler", "GradScaler.__init__", _MIXED),
    Row("torch.amp.autocast_mode", "autocast.__init__", _MIXED),
    Row("torch.nn.utils.clip_grad", "clip_grad_norm_", _CLIP),
    Row("torch.nn.utils", "clip_grad_norm_", _CLIP),
    # its kind of device of which a process has one, and which needs no copies of the module
    Row("torch.nn.parallel.data_parallel", "DataParallel.__init__", exchange("mps", NAME)),
    *(Row(_FLEX, "_validate_device", listed("cuda", name)) for name in (NAME, "xla")),
    Row("fastai.torch_core", "default_device", wrapped(_HERE + "fastai_device")),
    Row("fastai.torch_core", "Tensor.set_meta", wrapped(_HERE + "fastai_meta")),
    Row("fasttransform.cast", "cast", wrapped(_HERE + "fastai_cast")),
    Row("fastai.optimizer", "Optimizer.step", marked),
    Row("sentence_transformers.util.environment", "get_device_name", _LAST),
    Row("torch_geometric.device", "device", _LAST),
    Row(_IGNITE + "base", "_SerialModel.device", _LAST),
    Row(_IGNITE + "native", "_NativeDistModel.device", _LAST),
)
_UNSET = replaced("cpu", NAME, unless="KERAS_TORCH_DEVICE")
# Keras asks for its device once, when it is imported.
_KERAS_ROWS = (
    Row("keras.src.backend.torch.core", "DEFAULT_DEVICE", _UNSET),
    *(
        Row("keras.src.callbacks.callback_list", f"CallbackList.on_{kind}_batch_end", marked)
        for kind in ("train", "test", "predict")
    ),
)
_FSDP = "torch.distributed.fsdp"
_SHARDED = "torch_hlo.frameworks.sharded:"
_FSDP_INIT = "FullyShardedDataParallel.__init__"
_MOVE = wrapped(_SHARDED + "move_states")
_DDP = "torch.nn.parallel.distributed"
_STAGER = "torch.distributed.checkpoint._state_dict_stager"
# these want CUDA or XPU, and work over gloo
_ANY_HOOK = exchange(("bf16_compress_hook", "bf16_compress_wrapper_hook"), ())
_NESTED = wrapped("torch_hlo.frameworks.nested:attention")
_COMPRESS = given_to("torch_hlo.frameworks.semi_structured:register")
_TRACEABLE = given_to("torch_hlo.lazy.traceable:dynamo_came")
_OPEN = wrapped("torch_hlo.frameworks.safe_files:safe_open")

ROWS = (
    Row("safetensors", "safe_open", _OPEN),
    Row("safetensors.torch", "safe_open", _OPEN),
    Row(f"{_FSDP}.fully_sharded_data_parallel", _FSDP_INIT, wrapped(_SHARDED + "build")),
    Row(f"{_FSDP}._fully_shard._fsdp_init", "_move_states_to_device", _MOVE),
    Row(f"{_FSDP}._init_utils", "_move_states_to_device", _MOVE),
    Row(f"{_FSDP}._flat_param", "FlatParamHandle.to_cpu", wrapped(_SHARDED + "stay")),
    Row(f"{_FSDP}._state_dict_utils", "_full_post_state_dict_hook", wrapped(_SHARDED + "offload")),
    Row("torch.nn.modules.batchnorm", "sync_batch_norm", given_to(_SHARDED + "synchronized_norm")),
    Row(_DDP, "DistributedDataParallel._check_comm_hook", _ANY_HOOK),
    Row(_DDP, "DistributedDataParallel.__init__", wrapped(_SHARDED + "renew")),
    Row(_STAGER, "StateDictStager._offload_tensor", wrapped(_SHARDED + "stage")),
    Row("torch.nested._internal.ops", "jagged_scaled_dot_product_attention", _NESTED),
    Row("torch._dynamo", "optimize", _TRACEABLE),
    Row("torch.sparse", "SparseSemiStructuredTensorCUTLASS", _COMPRESS),
    *_OTHER_ROWS,
    *_HUGGINGFACE_ROWS,
    *_KERAS_ROWS,
    *_lightning("lightning.fabric", "lightning.pytorch"),
    *_lightning("lightning_fabric", "pytorch_lightning"),
)


def register() -> None:
    """Let the frameworks use the device from now on."""
    install(ROWS)

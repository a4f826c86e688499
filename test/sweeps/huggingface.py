"""Tiny random Hugging Face architectures: one AdamW step on "hlo" against CPU (loss, gradients,
parameters).

    python -m test.sweeps.huggingface [--how lazy|compile|device|compile_dynamic] [--only bert,gpt2]
        [--json FILE] [--verbose]

`--how compile`: the model stays on the CPU and runs through torch.compile(backend="hlo").
`--how device`: it runs through torch.compile(backend="hlo") on the hlo device.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import inspect
import json
import signal
import sys
import traceback
import warnings

import torch

import torch_hlo
from test.sweeps import counted

SMALL = dict(
    hidden_size=32,
    d_model=32,
    n_embd=32,
    dim=32,
    embed_dim=32,
    num_hidden_layers=2,
    n_layer=2,
    n_layers=2,
    encoder_layers=2,
    decoder_layers=2,
    num_layers=2,
    num_decoder_layers=2,
    num_attention_heads=4,
    n_head=4,
    n_heads=4,
    num_heads=4,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=64,
    d_ff=64,
    ffn_dim=64,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    n_inner=64,
    hidden_dim=64,
    d_kv=8,
    vocab_size=99,
    max_position_embeddings=64,
    n_positions=64,
    image_size=32,
    patch_size=8,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    hidden_dropout=0.0,
    dropout_rate=0.0,
    classifier_dropout=0.0,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    embedding_size=32,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
    n_routed_experts=4,
    n_group=1,
    topk_group=1,
    moe_intermediate_size=32,
    layerdrop=0.0,
    encoder_layerdrop=0.0,
    decoder_layerdrop=0.0,
    use_cache=False,
    word_embed_proj_dim=32,
    rotary_dim=4,
    summary_first_dropout=0.0,
    drop_path_rate=0.0,
    initializer_range=0.2,
)


# What the general values do not fit.
_LATENT = dict(num_key_value_heads=4)  # multi-head latent attention has no groups
_SWIN = dict(
    embed_dim=24,
    depths=[1, 1],
    num_heads=[2, 4],
    window_size=2,
    image_size=32,
    patch_size=2,
    encoder_stride=4,
)
_AUDIO = dict(
    conv_dim=(32, 32),
    conv_kernel=(8, 4),
    conv_stride=(4, 4),
    num_feat_extract_layers=2,
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=2,
    mask_time_prob=0.0,
    mask_feature_prob=0.0,
    feat_proj_dropout=0.0,
    final_dropout=0.0,
    feat_quantizer_dropout=0.0,
    tdnn_dim=(32, 32),
    xvector_output_dim=32,
)
_MAMBA2 = dict(mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=16, mamba_expand=2)
SPECIAL = {
    **dict.fromkeys(
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa youtu minicpm3".split(),
        _LATENT,
    ),
    **dict.fromkeys("swin swinv2 donut-swin maskformer-swin".split(), _SWIN),
    **dict.fromkeys(
        "wav2vec2 hubert sew sew-d wavlm unispeech unispeech-sat data2vec-audio wav2vec2-conformer".split(),
        _AUDIO,
    ),
    **dict.fromkeys("bamba granitemoehybrid".split(), _MAMBA2),
    **dict.fromkeys(
        "convnext convnextv2".split(),
        dict(
            patch_size=4,
            image_size=64,
            hidden_sizes=[8, 16, 24, 32],
            depths=[1, 1, 1, 1],
        ),
    ),
    # the router's sigmoids must not saturate: equal scores have no order
    "afmoe": dict(initializer_range=0.02),
    "mamba2": dict(num_heads=8, head_dim=8, n_groups=1, state_size=16),
    "reformer": dict(
        is_decoder=True,
        axial_pos_shape=[4, 4],
        axial_pos_embds_dim=[16, 16],
        attention_head_size=8,
        num_hidden_layers=2,
        attn_layers=["local", "lsh"],
    ),
    "resnet": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
    "regnet": dict(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], groups_width=4),
    "xlm": dict(emb_dim=32, n_words=99),
    "flaubert": dict(emb_dim=32, n_words=99),
    "luke": dict(entity_vocab_size=9, entity_emb_size=16),
    "xmod": dict(languages=["en_XX"], default_language="en_XX"),
    "zamba2": dict(mamba_ngroups=1, n_mamba_heads=8, mamba_d_state=16),
    "audio-spectrogram-transformer": dict(num_mel_bins=16, max_length=32, patch_size=8),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "dots1": dict(n_shared_experts=1),
}


def architectures() -> list[tuple[str, type, type]]:
    """(model type, configuration class, model class with a loss)."""
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    heads = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_CTC_MAPPING_NAMES,
        auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
        auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )
    seen = set()
    for table in heads:
        for kind, name in table.items():
            if kind in seen:
                continue
            names = name if isinstance(name, (tuple, list)) else [name]
            try:
                model = getattr(transformers, names[0])
                config = CONFIG_MAPPING[kind]
            except Exception:
                continue
            seen.add(kind)
            found.append((kind, config, model))
    return found


def build(kind: str, config_class: type, model_class: type, limit: int = 60_000_000):
    """The model with a small configuration, in training mode. Raises ValueError when it has more
    than `limit` parameters."""
    # a text model of a multimodal family has its own
    own = getattr(model_class, "config_class", None) or config_class
    values = {**SMALL, **SPECIAL.get(kind, {})}
    accepted = set(inspect.signature(own.__init__).parameters) | {
        name for c in own.__mro__ for name in getattr(c, "__annotations__", {})
    }
    try:
        config = own(**{k: v for k, v in values.items() if k in accepted})
    except Exception:
        config = own()
        for k, v in values.items():
            if hasattr(config, k) and isinstance(getattr(config, k), (int, float, list)):
                with contextlib.suppress(Exception):
                    setattr(config, k, v)
    config.use_cache = False
    with torch.device("meta"):  # to count what it would be
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > limit:
        raise ValueError(f"the configuration does not get small: {size} parameters")
    torch.manual_seed(0)
    model = model_class(config).train()
    if hasattr(model, "set_default_language"):
        model.set_default_language(config.languages[0])
    return model


def batch(model):
    config = model.config
    torch.manual_seed(1)
    if "Segmentation" in type(model).__name__ and model.main_input_name == "pixel_values":
        size = getattr(config, "image_size", 64)
        size = size if isinstance(size, int) else size[0]
        return dict(
            pixel_values=torch.randn(2, getattr(config, "num_channels", 3), size, size),
            labels=torch.randint(config.num_labels, (2, size, size)),
        )
    if hasattr(config, "image_size") and model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return dict(
            pixel_values=torch.randn(2, getattr(config, "num_channels", 3), size, size),
            labels=torch.randint(config.num_labels, (2,)),
        )
    if model.main_input_name == "pixel_values":
        return dict(
            pixel_values=torch.randn(2, getattr(config, "num_channels", 3), 64, 64),
            labels=torch.randint(config.num_labels, (2,)),
        )
    if model.main_input_name == "input_values":  # sound, or its spectrogram
        shape = (
            (2, config.max_length, config.num_mel_bins)
            if hasattr(config, "num_mel_bins")
            else (2, 800)
        )
        labels = (
            torch.randint(config.num_labels, (2,))
            if "Classification" in type(model).__name__
            else torch.randint(3, min(config.vocab_size, 30), (2, 5))
        )
        return dict(input_values=torch.randn(shape), labels=labels)
    ids = torch.randint(3, min(config.vocab_size, 99), (2, 16))
    inputs = dict(input_ids=ids, labels=ids.clone())
    if "SequenceClassification" in type(model).__name__:
        inputs["labels"] = torch.randint(config.num_labels, (2,))
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.clone()
    return inputs


def train(model, inputs: dict, device: str, seed: int = 2, wrap=lambda model: model):
    """(loss, gradients, parameters after one step), on the CPU. The step calls `wrap(model)`."""
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(seed)
    loss = wrap(model)(**{k: v.to(device) for k, v in inputs.items()}).loss
    loss.backward()
    gradients = {
        n: p.grad.detach().cpu() for n, p in model.named_parameters() if p.grad is not None
    }
    optimizer.step()
    if device == "hlo":
        torch_hlo.mark_step()
    return (
        loss.detach().cpu(),
        gradients,
        {n: p.detach().cpu() for n, p in model.named_parameters()},
    )


def compare(got, want) -> None:
    """Raises AssertionError unless two results of `train` agree."""
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
    added = {n for n in got[1].keys() ^ want[1].keys() if n in want[1] or got[1][n].count_nonzero()}
    # torch.compile makes zeros of what the loss does not depend on
    assert not added, f"gradients missing or added: {added}"
    largest = max(largest_of(g) for g in want[1].values())
    for name, g in want[1].items():
        scale = largest_of(g) + 1e-3 * largest  # some gradients are zero but for rounding
        torch.testing.assert_close(
            got[1][name],
            g,
            rtol=1e-2,
            atol=2e-3 * scale,
            msg=lambda m, n=name: f"gradient {n}: {m}",
        )
    for name, p in want[2].items():
        torch.testing.assert_close(
            got[2][name],
            p,
            rtol=1e-3,
            atol=2.5e-3,
            msg=lambda m, n=name: f"parameter {n}: {m}",
        )


def largest_of(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def undetermined(model, inputs: dict, want) -> str:
    """Why the CPU does not agree with itself: random by design, or rounding decides (ties of a
    router, chaos); "" if it does."""
    nudged = copy.deepcopy(model)
    with torch.no_grad():
        for p in nudged.parameters():
            if p.is_floating_point():
                # also where a router begins with zeros
                p.mul_(1 + 1e-6 * torch.randn_like(p)).add_(1e-6 * torch.randn_like(p))
    for why, again in (
        ("another seed", lambda: train(model, inputs, "cpu", seed=3)),
        ("a change of 1e-6", lambda: train(nudged, inputs, "cpu")),
    ):
        try:
            compare(again(), want)
        except AssertionError:
            return f"{why} changes the CPU's result too"
    return ""


# How a step is run on our side: arguments of `train`.
HOW = {
    "lazy": dict(device="hlo"),
    "compile": dict(device="cpu", wrap=lambda model: torch.compile(model, backend="hlo")),
    "device": dict(device="hlo", wrap=lambda model: torch.compile(model, backend="hlo")),
    "compile_dynamic": dict(
        device="cpu",
        wrap=lambda model: torch.compile(model, backend="hlo", dynamic=True),
    ),
}


def check(kind: str, config_class: type, model_class: type, how: str = "lazy") -> dict:
    """{"status": "pass" | "skip", "reason": ...}. Raises what the hlo device raises, and
    AssertionError for other values."""
    try:
        model = build(kind, config_class, model_class)
        inputs = batch(model)
        want = train(model, inputs, "cpu")
    except Exception as error:
        return {
            "status": "skip",
            "reason": f"on the CPU: {type(error).__name__}: {str(error)[:160]}",
        }
    if not torch.isfinite(want[0]):
        return {"status": "skip", "reason": "the CPU's loss is not finite"}
    got = train(model, inputs, **HOW[how])
    try:
        compare(got, want)
    except AssertionError:
        why = undetermined(model, inputs, want)
        if not why or not torch.isfinite(got[0]):
            raise
        return {"status": "skip", "reason": why}
    return {"status": "pass"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="comma-separated model types")
    parser.add_argument("--how", default="lazy", choices=HOW)
    parser.add_argument("--limit", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--json")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    only = set(args.only.split(",")) - {""}

    def alarm(*_):
        raise TimeoutError(f"more than {args.seconds} s")

    signal.signal(signal.SIGALRM, alarm)
    report = {}
    for kind, config_class, model_class in counted("architectures", architectures()):
        if only and kind not in only or len(report) >= args.limit:
            continue
        torch_hlo.metrics.clear_all()
        signal.alarm(args.seconds)
        try:
            row = check(kind, config_class, model_class, args.how)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {
                "status": "fail",
                "reason": f"{type(error).__name__}: {str(error).strip()[:300]}",
            }
            if args.verbose:
                traceback.print_exc()
        finally:
            signal.alarm(0)
            torch._dynamo.reset()
            # what a failure left pending would be compiled, and fail, with the next model
            gc.collect()
        row["fallbacks"] = [n for n in torch_hlo.metrics.counter_names() if n.startswith("aten::")]
        report[kind] = row
        print(kind, row, flush=True)
        if args.json:
            with open(args.json, "w") as f:
                json.dump(report, f, indent=1)
    tried = [r for r in report.values() if r["status"] != "skip"]
    passed = sum(r["status"] == "pass" for r in tried)
    print(f"{passed} of {len(tried)} pass ({len(report) - len(tried)} do not run on the CPU)")
    return 0


if __name__ == "__main__":
    sys.exit(main())

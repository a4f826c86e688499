"""Tiny random Hugging Face architectures: one AdamW step on "hlo" against CPU (loss, gradients, parameters).

    python -m test.sweeps.huggingface [--only bert,gpt2] [--json FILE] [--verbose]
"""
from __future__ import annotations

import argparse
import copy
import inspect
import json
import signal
import sys
import traceback
import warnings

import torch

import torch_hlo

SMALL = dict(
    hidden_size=32, d_model=32, n_embd=32, dim=32, embed_dim=32, num_hidden_layers=2, n_layer=2, n_layers=2, encoder_layers=2, decoder_layers=2,
    num_layers=2, num_decoder_layers=2, num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, intermediate_size=64, d_ff=64, ffn_dim=64, encoder_ffn_dim=64, decoder_ffn_dim=64, n_inner=64, hidden_dim=64,
    d_kv=8, vocab_size=99, max_position_embeddings=64, n_positions=64, image_size=32, patch_size=8, num_experts=4, num_local_experts=4,
    num_experts_per_tok=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, dropout=0.0,
    attention_dropout=0.0, activation_dropout=0.0, hidden_dropout=0.0, dropout_rate=0.0, classifier_dropout=0.0, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, embedding_size=32, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4,
    n_group=1, topk_group=1, moe_intermediate_size=32, layerdrop=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False,
    word_embed_proj_dim=32, rotary_dim=4, summary_first_dropout=0.0, drop_path_rate=0.0, initializer_range=0.2,
)  # fmt: skip


def architectures() -> list[tuple[str, type, type]]:
    """(model type, configuration class, model class with a loss)."""
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found = []
    heads = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )  # fmt: skip
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


def build(config_class, model_class):
    accepted = inspect.signature(config_class.__init__).parameters
    try:
        known = set(accepted) | set(getattr(config_class, "__annotations__", {}))
        config = config_class(**{k: v for k, v in SMALL.items() if k in known})
    except Exception:
        config = config_class()
        for k, v in SMALL.items():
            if hasattr(config, k) and isinstance(getattr(config, k), (int, float)):
                try:
                    setattr(config, k, v)
                except Exception:
                    pass
    config.use_cache = False
    torch.manual_seed(0)
    return model_class(config).train()


def batch(model):
    config = model.config
    torch.manual_seed(1)
    if hasattr(config, "image_size") and model.main_input_name == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return dict(pixel_values=torch.randn(2, getattr(config, "num_channels", 3), size, size), labels=torch.randint(config.num_labels, (2,)))
    if model.main_input_name == "pixel_values":
        return dict(pixel_values=torch.randn(2, getattr(config, "num_channels", 3), 64, 64), labels=torch.randint(config.num_labels, (2,)))
    ids = torch.randint(3, min(config.vocab_size, 99), (2, 16))
    inputs = dict(input_ids=ids, labels=ids.clone())
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids.clone()
    return inputs


def train(model, inputs, device):
    model = copy.deepcopy(model).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(2)
    loss = model(**{k: v.to(device) for k, v in inputs.items()}).loss
    loss.backward()
    gradients = {n: p.grad.detach().cpu() for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    if device == "hlo":
        torch_hlo.mark_step()
    return loss.detach().cpu(), gradients, {n: p.detach().cpu() for n, p in model.named_parameters()}


def check(kind, config_class, model_class) -> dict:
    try:
        model = build(config_class, model_class)
        if sum(p.numel() for p in model.parameters()) > 60_000_000:
            return {"status": "skip", "reason": "the configuration does not get small"}
        inputs = batch(model)
        want = train(model, inputs, "cpu")
    except Exception as error:
        return {"status": "skip", "reason": f"on the CPU: {type(error).__name__}: {str(error)[:160]}"}
    if not torch.isfinite(want[0]):
        return {"status": "skip", "reason": "the CPU's loss is not finite"}
    got = train(model, inputs, "hlo")
    torch.testing.assert_close(got[0], want[0], rtol=1e-3, atol=1e-4)
    assert got[1].keys() == want[1].keys(), f"gradients missing or added: {got[1].keys() ^ want[1].keys()}"
    largest = max(g.abs().max().item() for g in want[1].values())
    for name, g in want[1].items():
        scale = g.abs().max().item() + 1e-3 * largest  # some gradients are zero but for rounding
        torch.testing.assert_close(got[1][name], g, rtol=1e-2, atol=2e-3 * scale, msg=lambda m, n=name: f"gradient {n}: {m}")
    for name, p in want[2].items():
        torch.testing.assert_close(got[2][name], p, rtol=1e-3, atol=2.5e-3, msg=lambda m, n=name: f"parameter {n}: {m}")
    return {"status": "pass"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="comma-separated model types")
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
    for kind, config_class, model_class in architectures():
        if only and kind not in only or len(report) >= args.limit:
            continue
        torch_hlo.metrics.clear_all()
        signal.alarm(args.seconds)
        try:
            row = check(kind, config_class, model_class)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {"status": "fail", "reason": f"{type(error).__name__}: {str(error).strip()[:300]}"}
            if args.verbose:
                traceback.print_exc()
        finally:
            signal.alarm(0)
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
